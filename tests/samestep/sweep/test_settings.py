"""Search spaces and command lines: what they mean, and what is rejected with one message."""

from pathlib import Path

import pytest

from samestep.command_line import call
from samestep.errors import ConfigError
from samestep.sweep import settings
from samestep.sweep.main import main
from tests.conftest import CONFIGS, ROOT

LR = "model.optimizer.lr"
REJECTED = [
    ("", "values, such as 'model.optimizer.lr=tag(log,interval(1e-4,1e-1))'\n"),
    ("sweep=digit", "sweep=digit: no such choice; did you mean sweep=digits_lr?"),
    ("sweep=digits_lr n_trials=0", "error: n_trials=0: must be at least 1"),
    (f"{LR}=interval(1,2)", "error: a search without sweep=NAME needs a name: RUN_ID=NAME\n"),
    ("sweep=digits_lr n_trials=a", "n_trials: Value 'a' of type 'str' could not be converted"),
    ("sweep=digits_lr n_trails=3", "n_trails=3: no such key; did you mean n_trials=3?"),
    ("sweep=digits_lr run_id=mine", "run_id: each trial has its own; RUN_ID=... names the search"),
    (f"sweep=digits_lr {LR}=tag(log,interval(0,1))", "`low > 0` must hold for `log=True`"),
    (f"sweep=digits_lr {LR}=choice(0.1,a)", f"{LR}=a"),
    ("sweep=digits_lr model=choice(mlp,cnm)", "model=cnm: no such choice; did you mean model=cnn?"),
    ("sweep=digits_lr trainer.gradient_clip_val=interval(-1,1)", "must be null or a number above"),
    (f"sweep=digits_lr {LR}r=interval(0,1)", f"{LR}r"),
    ("sweep=digits_lr ~callbacks.checkpoints", "a search compares trials by a metric: callbacks.c"),
    ("sweep=digits_lr cluster=runai", "cluster=runai: a search needs local, slurm, or Kubernet"),
    ("sweep=digits_lr cluster=k8s", "reads metrics from copies: callbacks.artifacts.url=s3://"),
    (
        "sweep=digits_lr cluster=k8s +callbacks.x._target_=no.X",
        "callbacks.x._target_=no.X: the mo",
    ),
    ("sweep=digits_lr pruner._target_=optuna.pruners.Foo", "Error locating target 'optuna.pruners"),
    ("sweep=digits_lr sampler.nonsense=1", "unexpected keyword argument 'nonsense'"),
    ("sweep=digits_lr model.optimizer.weight_decya=0", "did you mean weight_decay"),
]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: another one would make each composition new."""
    return tmp_path_factory.mktemp("empty")


@pytest.mark.parametrize(("words", "message"), REJECTED)
def test_what_cannot_be_searched_is_one_message_and_leaves_nothing(
    empty: Path, capsys: pytest.CaptureFixture, words: str, message: str
):
    assert call(lambda: main([*words.split(), f"run_root={empty / 'runs'}"])) == 2
    assert message in capsys.readouterr().err
    assert not list(empty.iterdir())


@pytest.mark.parametrize("path", sorted((CONFIGS / "sweep").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_sweep_is_right(path: Path):
    read = settings.read([f"sweep={path.stem}"])
    assert (read.monitor, read.is_max) == ("val/accuracy", True)
    header = path.read_text().partition("n_trials:")[0]
    assert f"samestep sweep sweep={path.stem}" in header


def test_the_docs_show_a_file_of_configs():
    text = (CONFIGS / "sweep/nets.yaml").read_text().partition("\n\n")[2]
    assert f"```yaml\n{text}```" in (ROOT / "docs/sweep.md").read_text()


def test_hydras_grammar_becomes_optunas_distributions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", "mine")
    words = [
        "seed=choice(1,2)", "model=mlp,cnn", f"{LR}=tag(log,interval(1e-4,1))",
        "trainer.max_epochs=range(5,21,5)", "model.label_smoothing=range(0,1,0.25)",
        "data.global_batch_size=int(interval(16,64))", "model.optimizer.weight_decay=0",
    ]  # fmt: skip
    read = settings.read(words)
    assert {key: str(distribution) for key, distribution in read.space.items()} == {
        "seed": "CategoricalDistribution(choices=(1, 2))",
        "model": "CategoricalDistribution(choices=('mlp', 'cnn'))",
        LR: "FloatDistribution(high=1.0, log=True, low=0.0001, step=None)",
        "trainer.max_epochs": "IntDistribution(high=20, log=False, low=5, step=5)",
        "model.label_smoothing": "FloatDistribution(high=0.75, log=False, low=0.0, step=0.25)",
        "data.global_batch_size": "IntDistribution(high=64, log=False, low=16, step=1)",
    }
    assert (read.name, read.overrides) == ("mine", ["model.optimizer.weight_decay=0"])
    words = read.choose({"model": "mlp", LR: 0.0123456789, "seed": 2})
    assert words == ["model=mlp", f"{LR}=0.012346", "seed=2"]


def test_a_typed_value_replaces_that_of_the_file():
    words = ["trainer.max_epochs=4", f"{LR}=0.1", "~callbacks.predictions"]
    read = settings.read(["sweep=digits_lr", *words])  # which says trainer.max_epochs=10
    assert {*read.overrides} == {*words}
    assert LR not in read.space


def test_any_logged_metric_can_be_the_objective():
    words = ["callbacks.checkpoints.monitor=val/loss", "callbacks.checkpoints.mode=min"]
    # A subclass is found as its parent is.
    words += ["callbacks.checkpoints._target_=library.tests.callbacks.test_run_state.Keep"]
    read = settings.read(["sweep=digits_lr", *words])
    assert (read.monitor, read.is_max) == ("val/loss", False)


@pytest.mark.parametrize(
    ("visible", "words", "groups"),
    [
        ("0,1,2,3", ["trials_at_once=2", "trainer.devices=2"], ["0,1", "2,3"]),
        ("5,7", ["trials_at_once=2"], ["5", "7"]),
        ("0,1,2,3", ["trials_at_once=2", "trainer.devices=auto"], ["0,1", "2,3"]),
        ("0,1", ["trials_at_once=1"], ["0,1"]),
        ("0,1", ["trials_at_once=2", "trainer.accelerator=cpu"], [None, None]),
        ("0,1", ["trials_at_once=2", "trainer.devices=2"], "the 2 GPUs here are enough for 1"),
    ],
)
def test_trials_share_the_gpus(monkeypatch, visible: str, words: list[str], groups):
    from samestep.sweep.search import share_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    read = settings.read(["sweep=digits_lr", *words])
    if isinstance(groups, str):
        with pytest.raises(ConfigError, match=groups):
            share_gpus(read)
    else:
        assert share_gpus(read) == groups


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize(
    "sampler", ["{_target_: optuna.samplers.GridSampler, search_space: {a: [1]}}",
                "{_target_: optuna.samplers.BruteForceSampler}"],
)  # fmt: skip
def test_a_sampler_of_grids_is_one_message(empty: Path, capsys, sampler: str):
    assert (
        call(lambda: main(["sweep=nets", f"sampler={sampler}", f"run_root={empty / 'runs'}"])) == 2
    )
    error = capsys.readouterr().err
    assert "Sampler: tries every value, whatever n_trials says" in error
    assert "; train a grid: python train.py -m KEY=VALUE,VALUE" in error
    assert not list(empty.iterdir())
