from pathlib import Path

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
)

from samestep.errors import ConfigError
from samestep.ranks import ddp, environment, strategies
from samestep.run_spec import RunSpec


def test_an_ordinary_dataloader_is_shared_out_over_all_ranks_of_unequal_nodes(monkeypatch):
    """Lightning would multiply this node's two devices by two nodes, which have three."""
    monkeypatch.setattr(environment, "under_torchrun", lambda: True)
    spec = RunSpec("test", Path(), 0, strategy="ddp", accelerator="cpu", timeout_s=7)
    strategy = strategies.topology(spec)["strategy"]
    assert type(strategy) is strategies.UnequalNodesDDP
    assert isinstance(strategy, DDPStrategy)
    monkeypatch.setattr(type(strategy), "world_size", 3)
    monkeypatch.setattr(type(strategy), "global_rank", 2)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 2}
    spec = RunSpec("test", Path(), 0, strategy="ddp_find_unused_parameters_true")
    assert strategies.topology(spec)["strategy"]._ddp_kwargs["find_unused_parameters"]


def test_a_strategy_of_the_user_gets_our_options_and_keeps_its_own(monkeypatch):
    monkeypatch.setattr(environment, "under_torchrun", lambda: True)
    spec = RunSpec("test", Path(), accelerator="cpu", deterministic=True)
    own = DDPStrategy(static_graph=True, gradient_as_bucket_view=False)
    strategies.topology(spec, own)
    assert type(own) is strategies.UnequalNodesDDP
    assert isinstance(own.cluster_environment, strategies.TorchrunEnvironment)
    assert own._ddp_kwargs == {
        "static_graph": True, "gradient_as_bucket_view": False, "find_unused_parameters": True,
        **ddp.without_sync_in_forward(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_whose_checkpoints_are_in_parts_are_rejected(kind: type):
    with pytest.raises(ConfigError, match=r"is not supported: .* use strategy=fsdp, which shards"):
        strategies.check_kind(kind)


def test_a_strategy_for_one_rank_is_rejected_on_two(monkeypatch):
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="is for one rank, and there are 2"):
        strategies.check(SingleDeviceStrategy())
