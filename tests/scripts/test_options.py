"""Command lines of the scripts, read and refused."""

import os
import shutil
from pathlib import Path

import options
import pytest

from scripts import evaluate, export, predict, upload
from tests.conftest import ROOT, run

PARSERS = {
    "evaluate": evaluate.make_parser,
    "predict": predict.make_parser,
    "export": export.make_parser,
    "upload": upload.make_parser,
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


@pytest.mark.usefixtures("clone")
def test_values_have_defaults_and_types() -> None:
    arguments = options.parse(predict.make_parser(), ["runs/0", "--top", "12", "a.png"])
    assert vars(arguments) == {
        "run_dir": Path("runs/0"), "ckpt": None, "top": 12, "accelerator": "auto",
        "format": "table", "files": ["a.png"], "trust": False,
    }  # fmt: skip
    words = ["runs/0", "--data-root", "a=b", "--no-download"]
    assert vars(options.parse(export.make_parser(), words)) == {
        "run_dir": Path("runs/0"), "ckpt": None, "root": Path("a=b"), "file": None,
        "mirror": None,
        "download": False, "licence": None, "trust": False,
    }  # fmt: skip


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize(
    "words",
    [
        "runs/0 a.png b=3.png --top 2",
        "--top 2 runs/0 a.png b=3.png",
        "runs/0 a.png --top 2 b=3.png",
    ],
)
def test_options_may_stand_anywhere(words: str) -> None:
    arguments = options.parse(predict.make_parser(), words.split())
    assert (arguments.run_dir, arguments.top) == (Path("runs/0"), 2)
    assert arguments.files == ["a.png", "b=3.png"]


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
    with pytest.raises(SystemExit) as caught:
        options.parse(PARSERS[script](), words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("script", PARSERS)
@pytest.mark.parametrize("words", [[], [""], ["runs/9"], ["."]])
@pytest.mark.usefixtures("clone")
def test_if_there_is_no_such_run_the_newest_are_named(
    script: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(PARSERS[script](), words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "must be the directory of a run; the newest are" in error
    assert error.endswith("\n  runs/4\n  runs/3\n  runs/2\n")


def test_a_name_that_no_disk_takes_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(export.make_parser(), ["a" * 400])
    assert caught.value.code == 2
    assert "File name too long" in capsys.readouterr().err.splitlines()[-1]


def test_without_any_run_the_way_to_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        options.parse(export.make_parser(), [])
    assert "python train.py makes one in runs/" in capsys.readouterr().err


@pytest.mark.parametrize("script", PARSERS)
def test_help_and_wrong_usage_need_no_torch(script: str) -> None:
    code = (
        "import runpy, sys\nsys.path.insert(0, 'scripts')\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    path = f"scripts/{script}.py"
    result = run("-c", f"import sys; sys.argv[:1] = []\n{code}", path, "/nowhere")
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr.startswith("usage: ")
    assert "/nowhere must be the directory of a run" in result.stderr
    result = run("-c", f"import sys; sys.argv[:1] = []\n{code}", path, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"python scripts/{script}.py runs/" in result.stdout
    assert result.stdout.endswith("False\n")


def test_an_error_of_the_system_is_one_line_without_its_number(tmp_path: Path, capsys) -> None:
    assert options.run(lambda _: len(tmp_path.read_bytes()), None) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: Is a directory\n"


def test_every_script_uses_the_source_beside_it() -> None:
    others = ("options.py", "flyte_workflow.py")  # Flyte's pods have the package installed
    commands = [path for path in (ROOT / "scripts").glob("*.py") if path.name not in others]
    for path in commands:
        before, found, _ = path.read_text().partition("import options")
        assert found, path
        assert "samestep" not in before.split('"""', 2)[2], path


@pytest.mark.parametrize("name", ["doctor.py", "runs.py"])
def test_a_script_needs_no_installation(tmp_path: Path, name: str) -> None:
    """Not even that of another clone."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    package = tmp_path / "library/src/samestep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('found the source beside it')")
    done = run(f"scripts/{name}", cwd=tmp_path, PYTHONPATH="")
    assert done.stderr == "found the source beside it\n"
