"""Shared pieces: real runs of ``train.py``, small enough to take seconds."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from library.tests.programs import environment, free_port, run, run_code, run_ranks
from library.tests.shared import make_once, session_folder
from samestep import option_names

__all__ = ["environment", "free_port", "run", "run_code", "run_ranks"]

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
QUICK = [
    "trainer.max_epochs=2", "trainer.accelerator=cpu", "data.global_batch_size=60", "report=false",
]  # fmt: skip
"""Overrides that make a run of the digits finish in seconds: 20 steps an epoch, and no report."""

NO_PICTURES = "~callbacks.predictions"
"""Override for runs of which no test reads the predictions."""

REFERENCE = [
    *QUICK, "data.global_batch_size=32", "model=mlp", "data.crop_padding=1",
]  # fmt: skip
"""Overrides of ``reference_run``: shifted images, so that random numbers count too.

Three ranks cannot share its batch equally."""


RUN_PYTEST = """
import sys, pytest

class OneValueOfEach:
    def pytest_collection_modifyitems(self, items):
        items[:] = {item.nodeid.partition("[")[0]: item for item in items}.values()

sys.exit(pytest.main(sys.argv[1:], plugins=[OneValueOfEach()]))
"""
"""A copy has other names, and lacks files: each test runs with one of its values."""


def run_pytest(root: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run some tests of a copy of this project in a process of their own, within the copy."""
    # The forked process has imported the libraries before pytest.
    is_known = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", is_known]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "run_pytest.py")
        script.write_text(RUN_PYTEST)
        path = f"{root / 'src'}:{root}"
        return run(str(script), *options, *tests, cwd=root, PYTHONPATH=path)


def final_metrics(run_dir: Path) -> dict[str, float]:
    """What ``metrics.json`` holds, without seconds and memory, which differ from run to run."""
    metrics = json.loads((run_dir / "metrics.json").read_text())
    measured = ("time/", "system/")
    return {name: value for name, value in metrics.items() if not name.startswith(measured)}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder for the whole session, over all processes of pytest-xdist."""
    return session_folder(tmp_path_factory, pytestconfig)


@pytest.fixture(scope="session")
def shared_run(shared_folder: Path) -> Callable[..., Path]:
    """Make a run once for the whole session, over all processes of pytest-xdist.

    ``shared_run("name", *overrides)`` returns its directory. What the run printed lies beside it,
    in ``stdout.txt`` and ``stderr.txt``; with ``is_recorded`` also ``records``, where
    ``tests/recorder.py`` has written down each batch and the final weights. Tests may read a shared
    run and copy it; they must not write into it.
    """

    def share(name: str, *overrides: str, is_recorded: bool = False) -> Path:
        root = shared_folder / name
        if is_recorded:
            node = "+callbacks.recorder"
            target = f"{node}._target_=tests.recorder.Recorder"
            overrides += (target, f"{node}.dirpath={root / 'records'}")

        def make() -> None:
            result = run("train.py", *overrides, f"run_root={root}", RUN_ID=name)
            assert result.returncode == 0, result.stderr
            (root / "stdout.txt").write_text(result.stdout)
            (root / "stderr.txt").write_text(result.stderr)

        make_once(root, make)
        return root / name

    return share


@pytest.fixture(scope="session")
def digits_run(shared_run: Callable[..., Path]) -> Path:
    """Directory of a finished run: two epochs of digits, as a user trains them."""
    return shared_run("digits", *(word for word in QUICK if word != "report=false"))


@pytest.fixture(scope="session")
def reference_run(shared_run: Callable[..., Path]) -> Path:
    """Directory of a recorded run on one rank, with which runs on more ranks are compared."""
    return shared_run("reference", *REFERENCE, is_recorded=True)


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., object]:
    """Compose and check a configuration whose run lives in ``tmp_path``."""
    from samestep.hydra.compose import check

    def build(*overrides: str) -> object:
        # As an override, the folder would make each composition a new one.
        cfg = check(["run_id=test", *QUICK, *overrides])
        if not any(override.startswith("run_root=") for override in overrides):
            cfg.run_root = str(tmp_path)
        return cfg

    return build


@pytest.fixture(autouse=True)
def name_arguments() -> Iterator[None]:
    """Let messages name arguments again, after a test that has composed a configuration."""
    yield
    option_names.use({}, {})


@pytest.fixture
def spec(compose: Callable[..., Any]) -> Callable[..., Any]:
    """The RunSpec of a composed configuration."""
    from samestep.hydra.build import build_trainer

    return lambda *overrides: build_trainer(compose(*overrides), overrides).spec
