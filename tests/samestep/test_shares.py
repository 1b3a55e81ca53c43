"""How much each rank gets: numbers of the configuration, and what is measured."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch

from samestep import build, shares
from samestep.callbacks.share_out import ShareOut
from samestep.errors import ConfigError
from samestep.ranks import environment, preflight, process_group


@pytest.fixture
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank on the first node, two on the second."""
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    monkeypatch.setattr(environment, "num_nodes", lambda: 2)
    monkeypatch.setattr(environment, "node_rank", lambda: "this node")
    of_ranks = {"this node": [0, 1, 1], "this rank": ["slow", "fast", "fast"]}
    monkeypatch.setattr(process_group, "gather", lambda value: of_ranks.get(value, [value] * 3))


@pytest.mark.usefixtures("three_ranks")
def test_numbers_are_of_nodes_or_of_ranks():
    assert shares.by_rank([1, 2.5]) == [1, 2.5, 2.5]
    assert shares.by_rank([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(ConfigError, match="3 ranks on 2 nodes; give one number for each rank"):
        shares.by_rank([1, 2, 3, 4])


@pytest.mark.usefixtures("three_ranks")
def test_the_preflight_refuses_what_does_not_fit(compose):
    (finding,) = preflight.check_shares(compose("cluster.shares=[1,2,3,4]"))
    assert finding.result == "failed"
    assert isinstance(preflight.failure([finding]), ConfigError)
    (finding,) = preflight.check_shares(compose("cluster.shares=[1,2.5]"))
    assert finding.result == "ok"
    assert list(preflight.check_shares(compose())) == []


def test_shares_are_in_proportion_to_the_speeds():
    assert shares.shares_of([200, 100, 333]) == [2, 1, 3.33]
    assert shares.shares_of([100, 105, 109]) == [1, 1, 1]
    assert shares.shares_of([0, 100]) == [1, 1]  # too few steps to measure


@pytest.mark.usefixtures("three_ranks")
def test_what_was_measured_is_kept_for_ranks_of_the_same_kind(
    compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    cfg = compose("cluster.shares=auto")
    (tmp_path / "test/logs").mkdir(parents=True)
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[ShareOut()])
    measured = []

    def measure(*args: object) -> list[float]:
        measured.append(args)
        return [100, 250, 250]

    monkeypatch.setattr(shares, "measure_ranks", measure)
    monkeypatch.setattr(shares, "describe_rank", lambda cfg: "this rank")
    for _ in range(2):
        trainer.callbacks[0].shares = None
        shares.decide(cfg, trainer, L.LightningDataModule())
        assert trainer.callbacks[0].shares == (1, 2.5, 2.5)
    assert len(measured) == 1
    said = capsys.readouterr().out.splitlines()
    assert "1, 2.5, 2.5 (measured, " in said[0]
    assert "1, 2.5, 2.5 (measured by an earlier start, " in said[1]
    monkeypatch.setattr(shares, "describe_rank", lambda cfg: "another kind")
    shares.decide(cfg, trainer, L.LightningDataModule())
    assert len(measured) == 2
    path = tmp_path / "test/logs/shares.json"
    entries = json.loads(path.read_text())
    assert len(entries) == 2
    for damaged in ({"shares": [1, -1, 1]}, {"shares": [1, 1]}, {"shares": "1"}, {}):
        entry = {"ranks": entries[-1]["ranks"], **damaged}
        path.write_text(json.dumps([entry]))
        assert shares.read_record(path, entry["ranks"]) is None


def test_a_measurement_changes_nothing_in_the_run(compose):
    cfg = compose("cluster.shares=auto", "model=mlp", "model.net.dropout=0.5")
    model, data, trainer, _ = build.everything(cfg)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    first = next(iter(data.train_dataloader()))[0].ids
    samples_per_second, seconds = shares.measure(cfg, data, num_steps=4)
    assert samples_per_second > 0
    assert seconds > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert torch.equal(next(iter(data.train_dataloader()))[0].ids, first)
    assert trainer.global_step == 0


def test_too_few_steps_give_equal_shares(compose):
    cfg = compose("cluster.shares=auto", "model=mlp", "trainer.max_steps=2")
    assert shares.measure(cfg, build.everything(cfg).datamodule, num_steps=4) == (0, 0)


@pytest.mark.usefixtures("three_ranks")
@pytest.mark.parametrize(
    ("seconds", "rounds"), [(0.0001, [9, 500]), (0.01, [9, 100]), (0.5, [9]), (0.0, [9])]
)
def test_quick_steps_are_measured_for_a_second(
    compose, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: list[int]
):
    asked = []

    def measure(cfg: object, datamodule: object, num_steps: int) -> tuple[float, float]:
        asked.append(num_steps)
        return 100.0 * num_steps, seconds

    monkeypatch.setattr(shares, "measure", measure)
    monkeypatch.setattr(process_group, "on_all_ranks", lambda f, *args: f(*args))
    cfg = compose("cluster.shares=auto")
    assert shares.measure_ranks(cfg, L.LightningDataModule()) == [100.0 * rounds[-1]] * 3
    assert asked == rounds
