"""Command lines of the scripts, read and refused."""

import os
from pathlib import Path

import pytest
from options import OPTIONS, options

from samestep.errors import ConfigError
from tests.conftest import run


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
def test_values_have_defaults_and_the_types_of_their_defaults() -> None:
    values = options(["run=runs/0", "top=12", "a.png"], OPTIONS["predict"], files=True)
    assert values == {
        "run": "runs/0", "ckpt": "best", "top": 12, "accelerator": "auto", "format": "table",
        "files": ["a.png"],
    }  # fmt: skip
    values = options(
        ["run=runs/0", "data.root=a=b", "data.download=false"], OPTIONS["export"], files=False
    )
    assert values == {
        "run": "runs/0", "ckpt": "best", "data.root": "a=b", "data.mirror": None,
        "data.download": "false", "files": [],
    }  # fmt: skip


def test_a_file_may_have_an_equals_sign_in_its_name(clone: Path) -> None:
    (clone / "label=3.png").touch()
    values = options(["run=runs/0", "label=3.png"], OPTIONS["predict"], files=True)
    assert values["files"] == ["label=3.png"]


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("evaluate", "run=runs/0 splt=val", "splt=val: no such option; did you mean split?"),
        ("evaluate", "run=runs/0 split=tets", "split=tets: no such choice; did you mean test?"),
        ("evaluate", "run=runs/0 --split=val", "did you mean split?"),
        ("evaluate", "runs/0", "did you mean run=runs/0?"),
        ("evaluate", "run=runs/0 data.download=no", "there are true, false"),
        ("predict", "run=runs/0", "name image files"),
        ("predict", "run=runs/0 top=0 a.png", "top=0: must be a whole number, at least 1"),
        ("predict", "run=runs/0 top=many a.png", "top=many: must be a whole number"),
        ("predict", "run=runs/0 nofile=3.png", "nofile=3.png: no such option"),
        ("export", "run=runs/0 format=json", "format=json: no such option; there are run, ckpt"),
    ],
)
@pytest.mark.usefixtures("clone")
def test_what_is_wrong_is_said_with_a_remedy(script: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(words.split(), OPTIONS[script], files=script == "predict")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [[], ["run="], ["run=runs/9"], ["run=."]])
@pytest.mark.usefixtures("clone")
def test_where_there_is_no_such_run_the_newest_are_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="must be the directory of a run") as caught:
        options(words, OPTIONS["export"], files=False)
    assert str(caught.value).endswith("\n  run=runs/4\n  run=runs/3\n  run=runs/2")


def test_without_any_run_the_way_to_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="makes one in runs/"):
        options([], OPTIONS["export"], files=False)


@pytest.mark.parametrize("script", ["evaluate", "predict", "export"])
def test_help_and_wrong_usage_need_no_torch(script: str) -> None:
    code = (
        "import runpy, sys\nsys.path.insert(0, 'scripts')\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    path = f"scripts/{script}.py"
    told = run("-c", f"import sys; sys.argv[:1] = []\n{code}", path, "run=/nowhere", "top=x")
    assert (told.returncode, told.stdout) == (2, "False\n")
    assert told.stderr.startswith("error: ")
    assert told.stderr.count("\n") == 1
    told = run("-c", f"import sys; sys.argv[:1] = []\n{code}", path, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert f"python scripts/{script}.py run=runs/" in told.stdout
    assert "  ckpt=best|last\n" in told.stdout
    assert told.stdout.endswith("False\n")
