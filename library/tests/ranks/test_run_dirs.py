"""Where a run is: in scripts that name their directory in odd ways, and on several ranks."""

import json
from pathlib import Path

import pytest

from library.tests.programs import run, run_ranks
from samestep.errors import ConfigError
from samestep.ranks import environment, run_dirs

SCRIPT = """
import os, sys, time
from library.tests.kit import Net, batches
from samestep import Trainer

if sys.argv[2].startswith("~"):
    os.environ["HOME"] = os.getcwd()
options = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False}
options |= {"devices": int(sys.argv[1].removeprefix("devices=")), "num_sanity_val_steps": 0}
run_dir = f"{sys.argv[2]}/{time.time_ns()}"
trainer = Trainer(run_dir=run_dir, monitor="val_loss", mode="min", **options)
os.chdir("elsewhere")
model = Net()
trainer.fit(model, batches(), batches(shuffle=False))
trainer.test(model, batches(shuffle=False), verbose=False)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


@pytest.mark.program
@pytest.mark.parametrize(("devices", "place"), [(2, "runs"), (1, "~/runs")])
def test_a_name_made_of_the_time_is_one_directory(folder: Path, devices: int, place: str):
    """Under a profiler, which runs the script in names of its own."""
    profiled = ("-m", "cProfile", "-o", "profile", "script.py")
    done = run(*profiled, f"devices={devices}", place, cwd=folder)
    assert done.returncode == 0, done.stderr
    made = {path.name for path in folder.glob("[!.]*")}
    # A process that becomes the agent writes no profile.
    profile = {"profile"} if devices == 1 else set()
    assert made == {"elsewhere", "runs", "script.py"} | profile
    assert not [*(folder / "elsewhere").iterdir()]
    (run_dir,) = (folder / "runs").iterdir()
    assert json.loads((run_dir / "run.json").read_text())["state"] == "finished"
    assert (run_dir / "checkpoints/best.ckpt").exists()
    assert f"Finished: {run_dir}\n" in done.stdout  # not below the current directory


@pytest.mark.program
def test_ranks_with_other_directories_are_rejected_before_anything_is_written(folder: Path):
    done = run_ranks("script.py", "devices=2", "runs", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1
    assert f"run_dir: rank 0 has {folder}/runs/" in done.stderr
    assert f", and rank 1 has {folder}/runs/" in done.stderr
    assert not (folder / "runs").exists()


def test_a_home_directory_that_does_not_exist(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_dirs, "_fixed", [])
    with pytest.raises(ConfigError, match="run_dir=~no-such-user/runs: has no home directory"):
        run_dirs.fix("~no-such-user/runs")


def test_ranks_use_the_directories_of_their_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each Trainer of a script has its own; one after those of the agent names it itself."""
    monkeypatch.setattr(run_dirs, "_fixed", [])
    monkeypatch.setenv(environment.RUN_DIRS, json.dumps(["/a/one", "/a/two"]))
    monkeypatch.chdir(tmp_path)
    assert run_dirs.fix("one") == tmp_path / "one"  # no rank: a process that a rank has started
    monkeypatch.setattr(run_dirs, "_fixed", [])
    monkeypatch.setattr(environment, "under_torchrun", lambda: True)
    fixed = [run_dirs.fix(name) for name in ("other", "other", "three")]
    assert fixed == [Path("/a/one"), Path("/a/two"), tmp_path / "three"]
    run_dirs.hand_on()
    handed_on = json.loads(str(environment.variable(environment.RUN_DIRS)))
    assert handed_on == [str(path) for path in fixed]


@pytest.mark.parametrize(
    ("everyone", "is_same"),
    [
        ([(0, "/a/mine"), (0, "/a/mine"), (1, "/b/mine"), (1, "/b/mine")], True),
        ([(0, "/a/mine"), (0, "/b/mine")], False),
        ([(0, "/a/mine"), (1, "/a/yours")], False),
        ([(0, "/a/mine"), (1, "/b/mine"), (1, "/c/mine")], False),
    ],
)
def test_nodes_may_have_the_directory_in_different_places(
    monkeypatch: pytest.MonkeyPatch, everyone: list[tuple[int, str]], is_same: bool
):
    monkeypatch.setattr(run_dirs.process_group, "gather", lambda mine: everyone)
    if is_same:
        run_dirs.check_same(Path("/a/mine"))
        return
    with pytest.raises(ConfigError, match="rank 0 has /a/mine, and rank "):
        run_dirs.check_same(Path("/a/mine"))
