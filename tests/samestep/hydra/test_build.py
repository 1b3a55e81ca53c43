from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import (
    SingleDeviceStrategy,
)
from torch.utils.data import DataLoader

from library.tests.callbacks.tiny import Tiny
from samestep.errors import ConfigError
from samestep.hydra import build
from samestep.hydra.adapter import spec_of
from samestep.hydra.compose import check
from samestep.ranks import environment
from samestep.ranks.process_group import UnequalNodesDDP
from samestep.run.history import History


def test_a_second_progress_bar_is_refused(compose: Callable[..., object]):
    cfg = compose("+callbacks.rich._target_=lightning.pytorch.callbacks.RichProgressBar")
    with pytest.raises(ConfigError, match="leave it out; callbacks"):
        build.trainer(cfg, History(cfg.run_dir))


def test_checkpoints_elsewhere_are_rejected(compose: Callable[..., object], tmp_path: Path):
    """The same command would not find them, and begin anew."""
    key = "callbacks.checkpoints.dirpath"
    cfg = compose(f"{key}={tmp_path}/elsewhere")
    with pytest.raises(ConfigError, match=rf"{key}=.*/elsewhere: a run contin"):
        build.trainer(cfg, History(cfg.run_dir))
    (tmp_path / "link").symlink_to(tmp_path)
    cfg = compose(f"{key}={tmp_path}/link/x/../test/checkpoints/")
    build.trainer(cfg, History(cfg.run_dir))


def test_a_second_saver_of_checkpoints_is_rejected(compose: Callable[..., object]):
    cfg = compose(
        "+callbacks.keep={_target_:samestep.callbacks.checkpoints.Checkpoints,dirpath:x,every_s:1}"
    )
    with pytest.raises(ConfigError, match=r"callbacks.checkpoints and callbacks.keep: a run has"):
        build.trainer(cfg, History(cfg.run_dir))


class EachStage(L.LightningDataModule):
    """As in Lightning's examples: each stage has its own data."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches

    def setup(self, stage: str) -> None:
        if stage == "test":
            self.test = torch.ones(2 * self.num_batches, 2)

    def test_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.test, batch_size=1), DataLoader(self.test, batch_size=2)]


@pytest.mark.parametrize(
    ("share", "is_none"), [(0.5, False), (0.4, True), (0.0, False), (1, False)]
)
def test_a_share_of_the_test_that_is_no_batch_is_rejected(compose, share, is_none: bool):
    cfg = compose(f"trainer.limit_test_batches={share}")
    parts = build.Parts(Tiny(), EachStage(2), None, None)
    if not is_none:
        build.check_share_of_test(cfg, parts)
        return
    with pytest.raises(ConfigError, match=r"limit_test_batches=0.4: selects none of the 2 test"):
        build.check_share_of_test(cfg, parts)


def test_names_of_arguments_may_be_numbers(compose):
    """As in Lightning's GradientAccumulationScheduler(scheduling={1: 3})."""
    node = "+callbacks.slower"
    target = f"{node}._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler"
    cfg = compose(target, f"{node}.scheduling={{1:3}}")
    trainer = build.trainer(cfg, History(cfg.run_dir))
    (slower,) = (c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler))
    assert slower.scheduling == {0: 1, 1: 3}


OWN_LOADERS = [
    "data=null", "model=skeleton", "callbacks.checkpoints.monitor=val/loss",
    "callbacks.checkpoints.mode=min",
]  # fmt: skip


def test_a_model_may_have_the_loaders():
    cfg = check([*OWN_LOADERS, "run_id=test"])
    cfg.model = {"_target_": "pytorch_lightning.demos.boring_classes.BoringModel"}
    parts = build.build_parts(cfg)
    assert parts.datamodule is None
    assert build.has_test(parts.model, None)


def test_data_are_missed_before_a_run_begins():
    with pytest.raises(ConfigError, match="SkeletonModel has no train_dataloader; choose data"):
        build.build_parts(check([*OWN_LOADERS, "run_id=test"]))


STRATEGIES = "lightning.pytorch.strategies"


def strategy_of(compose: Callable[..., object], name: str, *options: str):
    words = ",".join([f"_target_:{STRATEGIES}.{name}", *options])
    cfg = compose(f"trainer.strategy={{{words}}}")
    return build.strategy(cfg, spec_of(cfg))


def test_a_strategy_may_have_options(compose):
    made = strategy_of(compose, "DDPStrategy", "static_graph:true", "gradient_as_bucket_view:false")
    assert type(made) is UnequalNodesDDP
    single = strategy_of(compose, "SingleDeviceStrategy")
    assert type(single) is SingleDeviceStrategy


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("FSDPStrategy", [], "use trainer.strategy=fsdp, which shards"),
        ("DeepSpeedStrategy", [], "use trainer.strategy=fsdp, which shards"),
        ("DDPStrategy", ["static_grph:true"], "did you mean static_graph?"),
        ("ddp.timedelta", [], "must be a Lightning Strategy"),
    ],
)
def test_strategies_whose_checkpoints_are_in_parts_are_rejected(compose, name, options, message):
    with pytest.raises(ConfigError) as caught:
        strategy_of(compose, name, *options)
    assert message in str(caught.value)


def test_a_strategy_for_one_rank_is_rejected_on_two(compose, monkeypatch):
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match="is for one rank, and there are 2"):
        strategy_of(compose, "SingleDeviceStrategy")


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, said in (
        ("needs", "import not_installed.part", "the module not_installed is missing; if it is a p"),
        ("raises", "x = 1\nx.y", r"AttributeError: .* \(.*/raises.py:2\)"),
        ("typo", "class Net(:", "cannot be imported: SyntaxError: invalid syntax .*line 1"),
        ("empty", "", "there is no such object"),
    ):
        (tmp_path / f"own_{name}").mkdir()
        (tmp_path / f"own_{name}/__init__.py").touch()
        (tmp_path / f"own_{name}/{name}.py").write_text(text)
        target = f"own_{name}.{name}.Net"
        with pytest.raises(ConfigError, match=rf"^model\._target_={target}: .*{said}"):
            build.locate(target, "model")
