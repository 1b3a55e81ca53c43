"""Command lines of ``samestep`` for one run, read and rejected."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from samestep import evaluate, export, predict
from samestep.command_line import Parser, call, find_run
from samestep.errors import ConfigError
from samestep.report import compare, live
from samestep.run import upload
from samestep.run.checkpoint import AtomicCheckpointIO
from tests.conftest import ROOT, run

CONFIG = "model: {_target_: project.Net}\ndata: {}\n"

MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "evaluate": evaluate.main,
    "predict": predict.main,
    "export": export.main,
    "report": live.main,
    "upload": upload.main,
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with five runs, ``runs/0`` the oldest, in which the test takes place."""
    for number in range(5):
        config = tmp_path / "runs" / str(number) / "config.yaml"
        config.parent.mkdir(parents=True)
        config.write_text("seed: 0\n")
        os.utime(config, (number, number))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("evaluate", "runs/0 --splt val", "--splt: no such option; did you mean --split?"),
        ("evaluate", "runs/0 split=val", "split=val: no such option; did you mean --split?"),
        ("evaluate", "runs/0 --split tets", "invalid choice: 'tets' (choose from"),
        ("evaluate", "run=runs/0", "did you mean runs/0?"),
        ("evaluate", "runs/0 runs/1", "runs/1: no such option"),
        ("predict", "runs/0 --top many a.png", "--top: invalid int value: 'many'"),
        ("export", "runs/0 --format json", "--format: no such option"),
        ("upload", "runs/0 --ulr s3://a", "did you mean --url?"),
    ],
)
@pytest.mark.usefixtures("clone")
def test_what_is_wrong_is_said_with_a_remedy(
    script: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(lambda: MAINS[script](words.split())) == 2
    said, error = capsys.readouterr()
    assert said == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("clone")
def test_a_run_is_found_by_its_name() -> None:
    parser = Parser("samestep evaluate", None)
    parser.add_run_dir()
    assert parser.parse(["3"]).run_dir == parser.read_run_dir("3") == Path("runs/3")
    assert parser.parse(["runs/3"]).run_dir == Path("runs/3")
    assert compare.find_runs([find_run("3"), find_run("runs/4")]) == [
        Path("runs/3").resolve(), Path("runs/4").resolve(),
    ]  # fmt: skip
    Path("3").mkdir()
    assert find_run("3") == Path("3"), "what is typed is a path first"


@pytest.mark.parametrize("script", MAINS)
@pytest.mark.parametrize("words", [[], ["runs/9"], ["nowhere"]])
@pytest.mark.usefixtures("clone")
def test_if_there_is_no_such_run_the_newest_are_named(
    script: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(lambda: MAINS[script](words)) == 2
    error = capsys.readouterr().err
    assert "must be the directory of a run; the newest are" in error
    assert error.endswith("\n  runs/4\n  runs/3\n  runs/2\n")


def test_a_name_that_no_disk_takes_is_one_message() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        export.main(["a" * 400])


def test_without_any_run_the_way_to_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"python train\.py makes one in runs/"):
        export.main([])


@pytest.mark.program
@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_help_and_wrong_usage_need_no_torch(command: str) -> None:
    code = (
        "import sys\n"
        "from samestep import cli\n"
        "from samestep.command_line import call\n"
        "sys.argv[0] = 'samestep'\n"
        "try:\n"
        "    sys.exit(call(cli.command))\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    result = run("-c", code, command, "/nowhere")
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr.startswith("error: ")
    assert "/nowhere" in result.stderr
    result = run("-c", code, command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"samestep {command}" in result.stdout
    assert result.stdout.endswith("False\n")


@pytest.mark.program
@pytest.mark.parametrize(
    "words",
    [["scripts/prepare_data.py", "seed=0"], ["-m", "samestep", "evaluate", "runs/0"]],
    ids=" ".join,
)
def test_a_command_takes_the_project_of_the_folder(clone: Path, words: list[str]) -> None:
    """Not that of another clone, which may be installed."""
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    shutil.copytree(ROOT / "configs", clone / "configs")
    shutil.copytree(ROOT / "examples", clone / "examples")
    package = clone / "src/project"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('found the source beside it')")
    (clone / "train.py").touch()
    (clone / "runs/0/config.yaml").write_text(CONFIG)
    (clone / "runs/0/checkpoints").mkdir()
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, clone / "runs/0/checkpoints/last.ckpt")
    done = run(*words, cwd=clone, PYTHONPATH="")
    assert done.stderr == "found the source beside it\n"
