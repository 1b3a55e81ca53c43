from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import OmegaConf

from samestep.callbacks.trainjob import TrainJobProgress
from samestep.errors import ConfigError
from samestep.fit_checks import has_test
from samestep.hydra import build
from samestep.hydra.compose import check
from samestep.ranks.environment import TRAINJOB_SERVER
from samestep.ranks.strategies import UnequalNodesDDP


def test_a_second_progress_bar_is_refused(compose: Callable[..., object]):
    cfg = compose("+callbacks.rich._target_=lightning.pytorch.callbacks.RichProgressBar")
    with pytest.raises(ConfigError, match="leave out RichProgressBar; Progress draws"):
        build.build_trainer(cfg)


def test_a_run_in_a_trainjob_reports_its_progress(
    compose: Callable[..., object], monkeypatch: pytest.MonkeyPatch
):
    def num_reporters() -> int:
        callbacks = build.build_trainer(compose()).callbacks
        return sum(isinstance(callback, TrainJobProgress) for callback in callbacks)

    assert num_reporters() == 0
    monkeypatch.setenv(TRAINJOB_SERVER, "https://localhost/status")
    assert num_reporters() == 1


def test_checkpoints_elsewhere_are_rejected(compose: Callable[..., object], tmp_path: Path):
    """The same command would not find them, and begin anew."""
    key = "callbacks.checkpoints.dirpath"
    cfg = compose(f"{key}={tmp_path}/elsewhere")
    with pytest.raises(ConfigError, match=rf"{key}=.*/elsewhere: a run contin"):
        build.build_trainer(cfg)
    (tmp_path / "link").symlink_to(tmp_path)
    cfg = compose(f"{key}={tmp_path}/link/x/../test/checkpoints/")
    build.build_trainer(cfg)


def test_a_second_saver_of_checkpoints_is_rejected(compose: Callable[..., object]):
    cfg = compose(
        "+callbacks.keep={_target_:samestep.callbacks.checkpoints.Checkpoints,dirpath:x,every_s:1}"
    )
    with pytest.raises(ConfigError, match="callbacks: a run has one Checkpoints"):
        build.build_trainer(cfg)


def test_names_of_arguments_may_be_numbers(compose):
    """As in Lightning's GradientAccumulationScheduler(scheduling={1: 3})."""
    node = "+callbacks.slower"
    target = f"{node}._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler"
    cfg = compose(target, f"{node}.scheduling={{1:3}}")
    trainer = build.build_trainer(cfg)
    (slower,) = (c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler))
    assert slower.scheduling == {0: 1, 1: 3}


LINEAR = {"_target_": "torch.nn.Linear", "_args_": [2, 3], "bias": False}


def test_arguments_may_be_given_by_position():
    node = OmegaConf.create({"_target_": "torch.nn.Sequential", "_args_": [LINEAR, LINEAR]})
    build.check_signatures(node, "model")
    made = build.build(node, "model")
    assert [tuple(layer.weight.shape) for layer in made] == [(3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"_args_": [2]}, "model: torch.nn.Linear needs a value for out_features"),
        ({"_args_": [1] * 6}, "model._args_: torch.nn.Linear takes 5 arguments by position, not 6"),
        ({"baias": True}, "model.baias: torch.nn.Linear takes no argument 'baias'"),
    ],
)
def test_arguments_by_position_are_counted(changed: dict[str, object], message: str):
    with pytest.raises(ConfigError) as caught:
        build.check_signatures(OmegaConf.create(LINEAR | changed), "model")
    assert str(caught.value).startswith(message)


OWN_LOADERS = [
    "data=null", "model=skeleton", "callbacks.checkpoints.monitor=val/loss",
    "callbacks.checkpoints.mode=min",
]  # fmt: skip


def test_a_model_may_have_the_loaders():
    cfg = check([*OWN_LOADERS, "run_id=test"])
    cfg.model = {"_target_": "pytorch_lightning.demos.boring_classes.BoringModel"}
    _, model, data = build.build_run(cfg)
    assert data is None
    assert has_test(model, None)


def test_data_are_missed_before_a_run_begins():
    with pytest.raises(ConfigError, match="SkeletonModel has no train_dataloader; choose data"):
        build.build_run(check([*OWN_LOADERS, "run_id=test"]))


STRATEGIES = "lightning.pytorch.strategies"


def strategy_of(compose: Callable[..., object], name: str, *options: str):
    words = ",".join([f"_target_:{STRATEGIES}.{name}", *options])
    cfg = compose(f"trainer.strategy={{{words}}}")
    return build.build_trainer(cfg).strategy


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


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, said in (
        ("needs", "import not_installed.part", "the module not_installed is missing; if it is a p"),
        ("raises", "x = 1\nx.y", r"AttributeError: .* \(.*/raises.py:2\)"),
        ("typo", "class Net(:", "cannot be imported: SyntaxError: invalid syntax .*line 1"),
        ("empty", "", "there is no such object$"),
        ("other", "class Nett: ...", "there is no such object; did you mean own_other.other.Nett"),
    ):
        (tmp_path / f"own_{name}").mkdir()
        (tmp_path / f"own_{name}/__init__.py").touch()
        (tmp_path / f"own_{name}/{name}.py").write_text(text)
        target = f"own_{name}.{name}.Net"
        with pytest.raises(ConfigError, match=rf"^model\._target_={target}: .*{said}"):
            build.locate(target, "model")
