"""One norm of the gradients for the guard, the statistics and clipping."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

from library.tests.kit import Net, fit, weights
from samestep.callbacks.loss_guard import LossGuard
from samestep.errors import RunError
from samestep.ranks import devices, gradients


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go the way of a GPU, whose losses and gradients no step reads."""

    class Reached:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            """Nothing to wait for."""

    def copy_at_once(values: Any) -> devices.Copy:
        return devices.Copy(torch.stack([*values]), Reached())

    monkeypatch.setattr(devices, "is_at_hand", lambda tensor: False)
    monkeypatch.setattr(devices, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(devices, "start_copy", copy_at_once)


class Operations(TorchDispatchMode):
    """Notes what is called within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def fused(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.01, fused=True)


def clipped(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    with Operations() as operations:
        fit(folder, lambda: Net(fused), gradient_clip_val=1e-3, **options)
    return weights(folder), operations.names


def test_guard_statistics_and_clipping_share_one_norm(tmp_path: Path, on_gpu: None):
    """The weights are those of a run in which each computes its own."""
    ours, operations = clipped(tmp_path / "ours")
    assert operations.count("_foreach_norm") == 8
    assert operations.count("linalg_vector_norm") == 8
    for name in ("is_at_hand", "is_on_gpu"):
        assert getattr(devices, name)(None) is (name == "is_on_gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "known_norm", lambda found: None)
        theirs, operations = clipped(tmp_path / "theirs")
    assert operations.count("_foreach_norm") == 16
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_clipping_follows_gradients_that_were_changed_since(tmp_path: Path, on_gpu: None):
    class Doubled(Net):
        """Changes its gradients behind the guard."""

        def __init__(self) -> None:
            super().__init__(lambda module: torch.optim.SGD(module.parameters(), 1.0, fused=True))
            self.norms: list[float] = []

        def on_before_optimizer_step(self, optimizer):
            for number, parameter in enumerate(self.parameters()):
                if number % 2:
                    parameter.grad.mul_(1e6)
                else:
                    parameter.grad = parameter.grad * 1e6

        def on_before_zero_grad(self, optimizer):
            found = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(get_total_norm(found).item())

    (run,) = fit(tmp_path, Doubled, gradient_clip_val=1e-3)
    # The later ones are small, where the loss is.
    assert max(run.module.norms[1:]) == pytest.approx(1e-3, rel=1e-3)


class Spoiled(Net):
    """Has a loss of nan in its fourth step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_step == 3 else loss


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_bad_step_on_a_gpu_is_skipped_and_told_later(
    tmp_path: Path, on_gpu: None, caplog: pytest.LogCaptureFixture, is_fused: bool
):
    configure = fused if is_fused else None
    (run,) = fit(tmp_path, lambda: Spoiled(configure), callbacks=lambda: [LossGuard(1)])
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    assert run.trainer.global_step == 8
    assert "step 4: the loss on rank 0 is infinite or nan; skipped, 1 of 1" in caplog.text


def test_one_bad_step_too_many_on_a_gpu_ends_the_run(tmp_path: Path, on_gpu: None):
    with pytest.raises(RunError, match="step 4: the loss on rank 0"):
        fit(tmp_path, lambda: Spoiled(fused))


@pytest.mark.parametrize("kernels", [gradients.KERNELS, ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_flag_tells_of_one_bad_value(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernels: tuple[str, ...]
):
    # Without one for the device, as on Apple's GPUs with torch 2.6.
    monkeypatch.setattr(gradients, "KERNELS", kernels)
    for value, is_bad in ((1.0, 0.0), (torch.nan, 1.0), (-torch.inf, 1.0)):
        found = [torch.ones(3, dtype=dtype), torch.full((2, 2), value, dtype=dtype)]
        flags = torch.zeros(2)
        gradients.mark_if_not_finite(found, flags[1])
        assert flags.tolist() == [0.0, is_bad]
        # Nothing but the flag is changed.
        assert torch.equal(found[0], torch.ones(3, dtype=dtype))
        assert torch.equal(gradients.norm_of(found), get_total_norm(found)) or is_bad


def test_bfloat16_has_no_kernel_of_its_own_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    types = []
    mark = gradients.mark_norms

    def note(norms: Any, flag: torch.Tensor) -> None:
        types.extend(norm.dtype for norm in norms)
        mark(norms, flag)

    monkeypatch.setattr(gradients, "mark_norms", note)
    gradients.mark_if_not_finite([torch.ones(3, dtype=torch.bfloat16)], torch.zeros(()))
    assert types == [torch.float32]


def test_sparse_and_mixed_gradients_have_a_norm():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (9,), check_invariants=True)
    mixed = [sparse, torch.full((3,), 2.0), torch.full((3,), 2.0, dtype=torch.float64)]
    assert gradients.norm_of(mixed).item() == pytest.approx(7)
    flag = torch.zeros(())
    gradients.mark_if_not_finite(mixed, flag)
    assert flag.item() == 0


def test_nothing_keeps_the_gradients_of_a_run(tmp_path: Path, on_gpu: None):
    fit(tmp_path, lambda: Net(fused), max_epochs=1)
    assert gradients.known_norm([]) is not None
    assert gradients._norms.gradients == []
