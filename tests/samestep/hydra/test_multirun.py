"""The command line of a grid: its name, the names of its runs, and what is rejected."""

from pathlib import Path
from unittest.mock import Mock

import hydra
import pytest

from samestep.errors import ConfigError
from samestep.grid import jobs
from samestep.grid.driver import Driver, Grid
from samestep.hydra import multirun
from samestep.run import record
from tests.conftest import run


@pytest.fixture(autouse=True)
def no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_ID", raising=False)


def grid_of(*words: str) -> Grid:
    keys, overrides = multirun.split_keys(words)
    return multirun.make_grid(keys, overrides)


def names_of(*words: str) -> list[str]:
    return [job.run_id for job in grid_of(*words).jobs]


def test_each_combination_is_a_run_with_a_readable_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", "mine")
    grid = grid_of("seed=range(0,2)", "model.optimizer.lr=1e-5,0.01", "model=mlp", "grid.jobs=2")
    assert [job.run_id for job in grid.jobs] == [
        "mine-lr-1e-05-seed-0", "mine-lr-0.01-seed-0",
        "mine-lr-1e-05-seed-1", "mine-lr-0.01-seed-1",
    ]  # fmt: skip
    assert grid.jobs[1].overrides == ["seed=0", "model.optimizer.lr=0.01", "model=mlp"]
    assert grid.jobs[1].values == {"seed": "0", "model.optimizer.lr": "0.01"}
    assert grid.jobs[1].run_dir == Path("runs/mine-lr-0.01-seed-0")
    assert grid.folder == Path("runs/grids/mine")
    assert names_of("experiment=digits_ema,digits_mlp", "model/optimizer=adamw,sgd")[0] == (
        "mine-experiment-digits-ema-optimizer-adamw"
    )
    # Nothing varies.
    assert names_of("seed=1") != names_of("seed=2")


def test_values_that_are_no_word_and_long_names_are_digests(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", "mine")
    first, second = names_of("+notes='a b','a/b'")
    assert first != second
    assert {len(first), len(second)} == {len("mine-notes-3f2a1b")}
    long = names_of(f"notes={'a' * 60},b")
    assert long[0][:5] == "mine-"
    assert len(long[0]) == len("mine-12345678")
    assert long[1] == "mine-notes-b"
    # Two runs of one name would be one run.
    alike = names_of("+model.net.a=b,b_c_d", "+model.net.c=d,d_c_d")
    assert len({*alike}) == 4


def test_the_name_of_a_grid_is_that_of_its_command():
    one = grid_of("seed=0,1", "model=mlp", "trainer.max_epochs=3")
    assert one.name.startswith("digits-mlp-")
    same = grid_of("trainer.max_epochs=3", "model=mlp", "seed=0,1,2", "grid.jobs=2")
    assert same.name == one.name
    assert [job.run_id for job in same.jobs][:2] == [job.run_id for job in one.jobs]
    assert grid_of("seed=choice(3)", "model=mlp", "trainer.max_epochs=3").name == one.name
    assert grid_of("seed=0,1", "model=mlp", "trainer.max_epochs=4").name != one.name
    assert grid_of("seed=0,1", "model=mlp,cnn").name.startswith("digits-")


def finish(grid: Grid) -> None:
    """Leave what the runs of a grid, and its driver, leave when all are finished."""
    grid.folder.mkdir(parents=True, exist_ok=True)
    for job in grid.jobs:
        job.run_dir.mkdir(exist_ok=True)
        record.update(job.run_dir, record.FINISHED)
        jobs.write_outcome(grid.folder, job, 0)


def names_to_start(*words: str) -> list[str]:
    """What the values of the runs are that the same command starts."""
    pending = Driver(grid_of(*words)).pending
    return [" ".join(job.values.values()) for job in pending]


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_comment_starts_no_finished_run(configs: Path, tmp_path: Path):
    words = [f"run_root={tmp_path}", "seed=0,1,2"]
    assert names_to_start(*words) == ["0", "1", "2"]
    finish(grid_of(*words))
    for name in ("cluster/slurm", "cluster/local", "data/digits", "train"):
        file = configs / f"{name}.yaml"
        file.write_text(f"{file.read_text()}\n# A comment.\n")
    assert names_to_start(*words) == []
    assert names_to_start(*reversed(words)) == []
    assert names_to_start(words[0], "seed=3,2,1,0") == ["3"]
    # The name of the grid changes too, unless it is typed.
    assert len(names_to_start(*words, "report=false")) == 3


def test_a_value_of_a_file_starts_the_runs_that_it_changes(configs: Path, tmp_path: Path):
    words = [f"run_root={tmp_path}", "model=mlp,cnn", "model.optimizer.lr=0.1,0.2"]
    finish(grid_of(*words))
    # No run uses this file, and each run has its own learning rate.
    replace_in(configs / "model/resnet18.yaml", "width: 64", "width: 32")
    replace_in(configs / "model/optimizer/adamw.yaml", "lr: 3.0e-3", "lr: 4.0e-3")
    (configs / "model/new.yaml").write_text("defaults: [mlp]\n")
    assert names_to_start(*words) == []
    replace_in(configs / "model/mlp.yaml", "hidden_size: 85", "hidden_size: 86")
    assert names_to_start(*words) == ["mlp 0.1", "mlp 0.2"]
    finish(grid_of(*words))
    replace_in(configs / "model/optimizer/adamw.yaml", "weight_decay: 0.01", "weight_decay: 0.02")
    assert len(names_to_start(*words)) == 4


def test_finished_runs_are_composed_once_for_all_values(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = [f"run_root={tmp_path}", "seed=range(0,100)"]
    finish(grid_of(*words))
    compose = Mock(side_effect=hydra.compose)
    monkeypatch.setattr(hydra, "compose", compose)
    assert names_to_start(*words) == []
    # The first run and its reference, which are checked, and one without a seed.
    assert compose.call_count == 3


def test_a_group_of_keys_is_merged_into_that_of_a_file(configs: Path, tmp_path: Path):
    words = [f"run_root={tmp_path}", "model=mlp", "model.net={hidden_size: 3},{hidden_size: 4}"]
    finish(grid_of(*words))
    replace_in(configs / "model/mlp.yaml", "dropout: 0.0", "dropout: 0.5")
    assert len(names_to_start(*words)) == 2


def test_a_file_that_breaks_while_a_grid_trains_stops_no_driver(configs: Path, tmp_path: Path):
    words = [f"run_root={tmp_path}", "model=cnn,mlp"]
    grid = grid_of(*words)
    text = (configs / "model/mlp.yaml").read_text()
    (configs / "model/mlp.yaml").write_text("{")
    finish(grid)
    (configs / "model/mlp.yaml").write_text(text)
    assert names_to_start(*words) == ["mlp"]


def test_on_a_cluster_each_run_is_submitted_or_followed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", "mine")
    words = ["cluster=k8s", "model.optimizer.lr=0.01,0.1"]
    left, followed = grid_of(*words), grid_of(*words, "grid.wait=true")
    assert (left.program, left.is_left) == (["-m", "samestep", "launch"], True)
    assert followed.program == ["-m", "samestep.sweep.cluster_job"]
    assert not followed.is_left
    # As Kubernetes allows them.
    assert [job.run_id for job in left.jobs] == ["mine-lr-0-01", "mine-lr-0-1"]
    assert left.is_elsewhere
    assert not grid_of("cluster=slurm", "seed=0,1").is_elsewhere


@pytest.mark.program
def test_a_run_that_the_cluster_cannot_get_has_failed(tmp_path: Path):
    words = ["cluster=k8s", "seed=0,1", f"run_root={tmp_path}"]
    done = run("train.py", "-m", *words, RUN_ID="mine")
    assert done.returncode == 1, done.stderr
    assert "2 of 2 runs have failed:\n  mine-seed-0: exit code 2: cluster.image=" in done.stdout
    line = f"RUN_ID=mine python train.py -m cluster=k8s seed=0,1 run_root={tmp_path}"
    assert done.stdout.endswith(f"To train what is missing:\n  {line}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=1,2", "hydra/launcher=joblib"], "hydra/launcher=joblib: each run of a grid has"),
        (["seed=1,2", "grid.jobs=0"], "grid.jobs=0: must be at least 1"),
        (["seed=1,2", "grid.jobs=x"], "grid.jobs: Value 'x' of type 'str' could not be"),
        (["seed=1,2", "grid.job=2"], "grid.job: Key 'job' not in 'Keys'; a grid has grid.jobs, "),
        (["seed=1,2", "grid.jobs=ä"], "grid.jobs=ä: cannot be read; write text with signs"),
        (["seed=1,2", "run_id=mine"], "run_id: each run of a grid has its own; RUN_ID=NAME"),
        (["seed=1,2", "cluster=k8s,slurm"], "cluster: all runs of a grid are on the same one"),
        (["seed=1,-1"], "seed=-1: must be"),
        (["seed=interval(0,1)"], "Can only enumerate"),
    ],
)
def test_what_no_run_could_be_trained_with_is_rejected(words, message, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        multirun.main([*words, f"run_root={tmp_path}"])
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_name_that_leaves_no_room_for_values_is_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", "a" * 60)
    with pytest.raises(ConfigError, match=r"a run would be called a+-"):
        grid_of("seed=0,1")
    monkeypatch.setenv("RUN_ID", "../a")
    with pytest.raises(ConfigError, match="a run would be called "):
        grid_of("seed=0,1")


def test_ranks_of_torchrun_start_no_grid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with pytest.raises(ConfigError, match="leave torchrun out"):
        multirun.main(["seed=0,1"])


def shares_of(*words: str) -> list[dict[str, str]]:
    keys, overrides = multirun.split_keys(words)
    needs = multirun.check_all(overrides, multirun=True, read=multirun.needs_of)
    return multirun.share_machine(keys, needs)


def test_gpus_and_processors_are_shared_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("samestep.ranks.environment.cpus_per_rank", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    on_cpus = ["trainer.accelerator=cpu", "trainer.devices=2,1"]
    assert shares_of(*on_cpus, "grid.jobs=2") == [{"OMP_NUM_THREADS": "2"}] * 2
    assert shares_of(*on_cpus) == [{}], "as a run that was started by hand"
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares_of("seed=0,1", "grid.jobs=2")] == [
        "4,5", "6,7",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"grid\.jobs=5: the 4 GPUs here are enough for 4"):
        shares_of("seed=0,1", "grid.jobs=5")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert shares_of(*on_cpus, "grid.jobs=2") == [{}, {}]
