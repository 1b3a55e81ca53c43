"""Search spaces and command lines that are refused, each with one message."""

from pathlib import Path

import pytest
import yaml

from samestep.callbacks.checkpoints import BestCheckpoint
from samestep.errors import ConfigError
from samestep.hydra.build import check_arguments
from samestep.run.artifacts import Artifacts
from samestep.sweep import settings, space
from samestep.sweep.main import main
from tests.conftest import CONFIGS, run

SWEEPS = sorted(path.stem for path in (CONFIGS / "sweep").glob("*.yaml"))
FLOAT = "{type: float, low: 0.001, high: 0.1}"
REFUSED_SPACES = [
    ("[]", "x.yaml: space must have the keys that are tried"),
    ("a: {type: flot, low: 1, high: 2}", "space.a.type=flot: must be one of float, int, choice; "),
    ("a: {type: flot, low: 1, high: 2}", "did you mean float?"),
    ("a: {low: 1, high: 2}", "space.a.type=null: must be one of"),
    ("a: 3", "space.a=3: must be a group of keys"),
    ("a: {type: float, low: 2, high: 1}", "space.a: low=2 must be below high=1"),
    ("a: {type: float, low: 0, high: 1, log: true}", "low=0 must be above 0, because log is true"),
    ("a: {type: float, low: 0, high: .inf}", "space.a.high=Infinity: must be a finite number"),
    ("a: {type: int, low: 1.5, high: 2}", "space.a.low=1.5: must be a whole number"),
    ("a: {type: float, low: 1}", "space.a.high is not set"),
    (
        "a: {type: float, low: 1, high: 2, lgo: true}",
        "space.a.lgo: no such key; there is",
    ),
    ("a: {type: float, low: 1, high: 2, log: 1}", "space.a.log=1: must be true or false"),
    ("a: {type: float, low: 1, high: 2, step: 5}", "step=5 must be at most high - low, 1"),
    ("a: {type: int, low: 1, high: 9, step: 2, log: true}", "log and step exclude each other"),
    ("a: {type: choice, choices: []}", "space.a.choices=[]: must be a list of at least one"),
    ("a: {type: choice, choices: [1, 2, 1]}", "space.a.choices: 1 is there twice"),
    ("run_id: {type: choice, choices: [a]}", "space.run_id: cannot be searched, each trial has"),
    ("callbacks.best.monitor: {type: choice, choices: [a]}", "compared by one metric"),
]
REFUSED_WORDS = [
    ("", "sweep is not set: add sweep=NAME; there is digits_lr"),
    ("sweep=digit", "sweep=digit: no such choice; did you mean sweep=digits_lr?"),
    ("sweep=digits_lr n_trials=0", "n_trials=0: must be a whole number at least 1"),
    ("sweep=digits_lr n_trails=3", "n_trails: no such key; did you mean n_trials=3?"),
    ("sweep=digits_lr -m", "-m: no such flag; grids are trained by python train.py -m"),
    ("sweep=digits_lr model.optimizer.lr=1", "model.optimizer.lr: is searched, so it has no fixed"),
    ("sweep=digits_lr sampler=3", "sampler=3: must be a group"),
    ("sweep=digits_lr 'x", "'x: is no override; write KEY=VALUE"),
]
REFUSED_RUNS = [  # by the configuration of a trial
    ("trainer.max_epoch=3", "error: trainer.max_epoch=3: no such key; did you mean"),
    ("cluster=docker", "cluster=docker: does not say how a run has ended"),
    ("cluster=k8s", "reads the metrics of its trials from their copies"),
    ("storage=foo://x", "storage=foo://x: NoSuchModuleError"),
    ("pruner._target_=os.system", "pruner._target_=os.system: must be a class of optuna.pruners"),
    ("sampler.nonsense=1", "sampler: optuna.samplers.TPESampler refuses: "),
    ("model.optimizer.weight_decya=0", "takes no argument 'weight_decya'; did you mean weight_d"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED_SPACES)
def test_a_wrong_space_is_refused(text: str, message: str):
    with pytest.raises(ConfigError) as refused:
        space.parse(yaml.safe_load(text), "x.yaml")
    assert message in str(refused.value)


@pytest.mark.parametrize(("words", "message"), REFUSED_WORDS)
def test_wrong_words_are_refused(words: str, message: str):
    with pytest.raises(ConfigError) as refused:
        settings.read(words.split())
    assert message in str(refused.value)


@pytest.mark.parametrize(("words", "message"), REFUSED_RUNS)
def test_a_search_that_cannot_be_run_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, words: str, message: str
):
    overrides = ["sweep=digits_lr", f"run_root={tmp_path / 'runs'}", *words.split()]
    assert main(overrides, "") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def refuse_space(parameters: list[space.Parameter]) -> None:
    """What a search asks of its space before it begins."""
    for cfg in settings.check_space(parameters, [], "x.yaml"):
        check_arguments(cfg)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.optimizer.lrr: " + FLOAT, "AdamW takes no argument 'lrr'; did you mean lr?"),
        (
            "model.label_smoothing: {type: float, low: 0, high: 1.5}",
            "model.label_smoothing=1.5: must be a number at least 0 and below 1 (the sp",
        ),
        ("model: {type: choice, choices: [mlp, cnm]}", "model=cnm: no such choice; did you mean"),
        (
            "model.optimizer._target_: {type: choice, choices: [torch.optim.Adma]}",
            "model.optimizer._target_=torch.optim.Adma: there is no such object",
        ),
    ],
)
def test_keys_and_values_of_a_space_are_checked_as_those_of_a_run(text: str, message: str):
    parameters = space.parse(yaml.safe_load(text), "x.yaml")
    with pytest.raises(ConfigError) as refused:
        refuse_space(parameters)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_shipped_sweep_is_right(name: str):
    read = settings.read([f"sweep={name}"])
    assert read.monitor == "val/accuracy"
    assert read.direction == "maximize"
    header = (CONFIGS / "sweep" / f"{name}.yaml").read_text().partition("n_trials:")[0]
    assert f"samestep sweep sweep={name}" in header


class KeepBest(BestCheckpoint):
    """Of a user, who has changed a little."""


class Copies(Artifacts):
    """Of a user, who has changed a little."""


def test_callbacks_of_other_names_and_classes_are_found(tmp_path: Path):
    words = [
        "sweep=digits_lr", "~callbacks.best", "~callbacks.artifacts", "shared_run_root=false",
        f"+callbacks.keep={{_target_:{__name__}.KeepBest,dirpath:x,monitor:val/loss,mode:min}}",
        f"+callbacks.copies={{_target_:{__name__}.Copies,url:{tmp_path},run_dir:x,"
        "flush_timeout_s:1}",
    ]  # fmt: skip
    read = settings.read(words)
    assert (read.monitor, read.direction) == ("val/loss", "minimize")
    read.cfg.cluster.name = "k8s"
    assert read.copies == str(tmp_path)
    with pytest.raises(ConfigError, match="a search needs a BestCheckpoint, by whose metric"):
        settings.read(["sweep=digits_lr", "~callbacks.best", "~callbacks.artifacts"])


def test_a_space_of_metrics_is_rejected(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(settings, "load", lambda path: {
        "n_trials": 2, "space": {"callbacks.keep.monitor": {
            "type": "choice", "choices": ["val/loss", "val/other_loss"]}},
    })  # fmt: skip
    keep = f"+callbacks.keep={{_target_:{__name__}.KeepBest,dirpath:x,monitor:x,mode:min}}"
    with pytest.raises(ConfigError, match=r"one metric, and not by val/loss .* and val/other_loss"):
        settings.read(["sweep=digits_lr", "~callbacks.best", keep])


def test_a_typed_value_replaces_that_of_the_file():
    words = ["seed=3", "trainer.max_epochs=4", "~callbacks.predictions"]
    read = settings.read(["sweep=digits_lr", *words])  # which says trainer.max_epochs=10
    assert read.overrides == words


def test_a_value_is_written_as_an_override():
    nodes = {
        "model": {"type": "choice", "choices": ["mlp", "cnn"]},
        "model.optimizer.betas": {"type": "choice", "choices": [[0.9, 0.99], [0.8, 0.9]]},
        "data.mirror": {"type": "choice", "choices": [None, "http://a/b,c"]},
        "seed": {"type": "int", "low": 0, "high": 3},
    }
    parameters = space.parse(nodes, "x.yaml")
    values = ["mlp", "[0.8,0.9]", "http://a/b,c", 2]
    assert [p.override(value) for p, value in zip(parameters, values, strict=True)] == [
        "model=mlp", "model.optimizer.betas=[0.8,0.9]", "data.mirror='http://a/b,c'", "seed=2",
    ]  # fmt: skip


def test_train_py_says_who_reads_a_sweep():
    done = run("train.py", "sweep=digits_lr")
    assert done.returncode == 2
    assert "samestep sweep sweep=digits_lr ..." in done.stderr


@pytest.mark.parametrize(
    ("visible", "words", "groups"),
    [
        ("0,1,2,3", ["trials_at_once=2", "trainer.devices=2"], ["0,1", "2,3"]),
        ("5,7", ["trials_at_once=2"], ["5", "7"]),
        ("0,1,2,3", ["trials_at_once=2", "trainer.devices=auto"], ["0,1", "2,3"]),
        ("0,1", ["trials_at_once=1"], []),
        ("", ["trials_at_once=2"], []),
    ],
)
def test_trials_share_the_gpus(monkeypatch, visible: str, words: list[str], groups: list[str]):
    from samestep.sweep.search import share_devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert share_devices(settings.read(["sweep=digits_lr", *words])) == groups


def test_too_few_gpus_are_an_error(monkeypatch):
    from samestep.sweep.search import share_devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="choose at most 1"):
        share_devices(settings.read(["sweep=digits_lr", "trials_at_once=2", "trainer.devices=2"]))
