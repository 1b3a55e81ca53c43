import pytest
import torch

from project.model.schedules import warmup_cosine


@pytest.mark.parametrize(("total_steps", "warmup"), [(100, 0.1), (100, 0.0), (3, 0.5), (1, 1.0)])
def test_learning_rate_rises_to_the_peak_and_falls_to_zero(total_steps: int, warmup: float):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = warmup_cosine(optimizer, total_steps=total_steps, warmup=warmup)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    peak = rates.index(max(rates))
    assert all(rate > 0 for rate in rates)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if warmup < 1:
        assert max(rates) == pytest.approx(2.0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-6)
