"""Shared pieces: real runs of ``train.py``, small enough to take seconds."""

import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import omegaconf.base
import pytest
from filelock import FileLock
from hydra._internal.config_repository import ConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from library.tests.programs import environment, free_port, run, run_code, run_ranks
from samestep import option_names
from tests import fork_server

__all__ = ["environment", "free_port", "run", "run_code", "run_ranks"]

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
QUICK = [
    "trainer.max_epochs=2", "trainer.accelerator=cpu", "data.global_batch_size=60", "report=false",
]  # fmt: skip
"""Overrides that make a run of the digits finish in seconds: 20 steps an epoch, and no report."""

NO_PICTURES = "~callbacks.predictions"
"""Override for runs of which no test looks at the pictures: these take a third of a short run."""

REFERENCE = [
    *QUICK, NO_PICTURES, "data.global_batch_size=32", "model=mlp", "data.crop_padding=1",
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
    """Run some tests of a copy of this project in a process of their own, within the copy.

    By its name, the fork server knows that this script starts programs.
    """
    # The forked process has imported the libraries before pytest.
    is_known = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", is_known]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, fork_server.RUN_PYTEST)
        script.write_text(RUN_PYTEST)
        path = f"{root / 'src'}:{root}"
        return run(str(script), *options, *tests, cwd=root, PYTHONPATH=path)


def final_metrics(run_dir: Path) -> dict[str, float]:
    """What ``metrics.json`` holds, without seconds and memory, which differ from run to run."""
    metrics = json.loads((run_dir / "metrics.json").read_text())
    measured = ("time/", "system/")
    return {name: value for name, value in metrics.items() if not name.startswith(measured)}


def pytest_configure(config: pytest.Config) -> None:
    """Start the Python programs under test from a process that has imported the libraries.

    In this process, Hydra reads and composes nothing twice.
    """
    # The hooks of this file are not asked for the tests of library/tests; those of a plug-in are.
    config.pluginmanager.register(ProcessorSeconds())
    # Containers often set this. Hundreds of processes would compile the same files.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["GOGC"] = "off"  # kubectl never lives long enough to need its garbage collector
    fork_server.install(environment())
    hydra.compose = compose_once
    ConfigRepository.load_config = load_once
    # Parsing an interpolation takes a tenth of a composition, and the trees are only read.
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)


original_compose = hydra.compose
original_load = ConfigRepository.load_config
LOADED: dict[object, bytes] = {}
UNREAD = {
    "CUDA_VISIBLE_DEVICES", "KUBECACHEDIR", "KUBECONFIG", "PYTEST_CURRENT_TEST", "SLURM_CONF",
}  # fmt: skip
"""Variables that no file of ``configs/`` reads, and that differ from test to test."""


def compose_once(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    return_hydra_config: bool = False,
) -> DictConfig:
    """``hydra.compose``, which takes a tenth of a second, with a memory for what it has composed.

    The files, the overrides and the environment are all that Hydra reads.
    """
    sources = GlobalHydra.instance().config_loader().get_sources()
    folders = [Path(source.path) for source in sources if source.scheme() == "file"]
    folders += fork_server.searched_folders(overrides)
    states = fork_server.states_of_files(folders)
    variables = frozenset((name, os.environ[name]) for name in os.environ if name not in UNREAD)
    surroundings = (tuple(folders), tuple(states), variables)
    composed = compose_in(surroundings, config_name, tuple(overrides), return_hydra_config)
    copied: DictConfig = pickle.loads(composed)  # deepcopy is several times slower
    return copied


@functools.lru_cache(maxsize=1000)
def compose_in(
    surroundings: object, config_name: str, overrides: tuple[str, ...], return_hydra_config: bool
) -> bytes:
    return pickle.dumps(original_compose(config_name, list(overrides), return_hydra_config))


def load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Hydra's reader of a file, a third of a composition, with a memory for what it has read."""
    folders = [source.path for source in repository.get_sources() if source.scheme() == "file"]
    paths = [Path(folder, f"{config_path.removesuffix('.yaml')}.yaml") for folder in folders]
    states = [
        (path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths if path.exists()
    ]
    if not states:
        return original_load(repository, config_path)
    key = (config_path, *states)
    if key not in LOADED:
        LOADED[key] = pickle.dumps(original_load(repository, config_path))
    loaded: ConfigResult | None = pickle.loads(LOADED[key])
    return loaded


STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="write what each test costs into FILE")


class ProcessorSeconds:
    """Lets the reports of a test say what it has cost, with its processes that have ended."""

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        item.stash[STARTED] = sum(os.times()[:4])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        item.user_properties[:] = [("cpu_s", sum(os.times()[:4]) - item.stash[STARTED])]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write for each test: its processor seconds, those of its processes too, and its seconds."""
    path = config.getoption("--cpu-times")
    if not path:
        return
    cpu_s: Counter[str] = Counter()
    wall_s: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            cost = dict(report.user_properties).get("cpu_s", 0.0)  # none of a process that crashed
            cpu_s[report.nodeid] = max(cpu_s[report.nodeid], cost)
            wall_s[report.nodeid] += report.duration
    lines = [f"{cpu_s.total():8.2f} {wall_s.total():8.2f} all"]
    lines += [f"{cpu_s[name]:8.2f} {wall_s[name]:8.2f} {name}" for name, _ in cpu_s.most_common()]
    Path(path).write_text("\n".join(["     cpu     wall test", *lines]) + "\n")


MARKED_PATHS = {
    f"{ROOT}/tests/labs/test_elastic.py": "faults",
    f"{ROOT}/tests/labs/test_faults.py": "faults",
    f"{ROOT}/tests/samestep/launch/": "clusters",
}


def pytest_collection_finish() -> None:
    """Compute with one thread, as the programs under test do.

    The process that hands out the tests to pytest-xdist collects none, and needs no torch.
    """
    import torch

    torch.set_num_threads(1)


LONG_FILES = {
    f"{ROOT}/{name}"
    for name in (
        "library/tests/ranks/test_heartbeat.py",
        "library/tests/test_distribution.py",
        "library/tests/test_sharded.py",
        "library/tests/test_trainer.py",
        "tests/labs/test_elastic.py",
        "tests/labs/test_faults.py",
        "tests/scripts/test_sweep.py",
        "tests/test_copies.py",
        "tests/test_start.py",
    )
}
"""Files with a test that takes more than five seconds on a quiet machine."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of clusters and of faults by the place of their files.

    They wait more than they compute. Each process of pytest-xdist begins with its own part of all
    tests, so their files are spread evenly: some processes wait while others compute.
    """
    kinds: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        for path, marker in MARKED_PATHS.items():
            if str(item.path).startswith(path):
                item.add_marker(marker)
        waits = any(item.get_closest_marker(name) for name in MARKED_PATHS.values())
        kinds[waits].append(item)
    begins: dict[Path, float] = {}
    for kind in kinds.values():
        for number, item in enumerate(kind):
            begins.setdefault(item.path, number / len(kind))
    items.sort(key=lambda item: begins[item.path])
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        items[:] = begin_with_long_files(items, config.workerinput["workercount"])


def begin_with_long_files(items: list[pytest.Item], num_processes: int) -> list[pytest.Item]:
    """Let the part of each process begin with files that take long.

    pytest-xdist cuts the list into equal parts. A process that has done its part takes tests from
    the end of another one: a long test there would run at last, while the other processes wait.
    """
    long: dict[Path, list[pytest.Item]] = {}
    others: list[pytest.Item] = []
    for item in items:
        if str(item.path) in LONG_FILES:
            long.setdefault(item.path, []).append(item)
        else:
            others.append(item)
    starts: list[list[pytest.Item]] = [[] for _ in range(num_processes)]
    for number, file in enumerate(long.values()):
        starts[number % num_processes] += file
    ordered: list[pytest.Item] = []
    for number, start in enumerate(starts):
        size = (len(items) - len(ordered)) // (num_processes - number)
        rest = max(0, size - len(start))
        ordered += start + others[:rest]
        del others[:rest]
    return ordered


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder for the whole session, over all processes of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):  # a process of pytest-xdist
        root = root.parent
    root /= "shared"
    root.mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="session")
def shared_run(shared_folder: Path) -> Callable[..., Path]:
    """Make a run once for the whole session, over all processes of pytest-xdist.

    ``shared_run("name", *overrides)`` returns its directory. What the run printed lies beside it,
    in ``stdout.txt`` and ``stderr.txt``; with ``is_recorded`` also ``records``, where
    ``tests/recorder.py`` has written down each batch and the final weights. Tests may read a shared
    run and copy it; they must not write into it.
    """
    root = shared_folder

    def make(name: str, *overrides: str, is_recorded: bool = False) -> Path:
        if is_recorded:
            node = "+callbacks.recorder"
            target = f"{node}._target_=tests.recorder.Recorder"
            overrides += (target, f"{node}.dirpath={root / name / 'records'}")
        finished = root / f"{name}.finished"
        with FileLock(root / f"{name}.lock"):
            if not finished.exists():
                (root / name).mkdir(exist_ok=True)
                result = run("train.py", *overrides, f"run_root={root / name}", RUN_ID=name)
                assert result.returncode == 0, result.stderr
                (root / name / "stdout.txt").write_text(result.stdout)
                (root / name / "stderr.txt").write_text(result.stderr)
                finished.touch()
        return root / name / name

    return make


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
