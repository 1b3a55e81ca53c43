"""How all tests are run: in levels, programs are forked, nothing is composed twice, costs counted.

The ``conftest.py`` of the root takes these hooks, for the tests of the library too.
"""

import fcntl
import functools
import gc
import itertools
import os
import pickle
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import hydra
import omegaconf.base
import pytest
from hydra._internal.config_repository import ConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from library.tests.programs import environment
from tests import fork_server, levels

ROOT = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Start the Python programs under test from a process that has imported the libraries.

    In this process, Hydra reads and composes nothing twice.
    """
    config.pluginmanager.register(ProcessorSeconds())
    config.pluginmanager.register(levels)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail a test that leaves a variable behind which libraries read while they start.

    No program of a later test could be forked then: each would import the libraries by itself.
    """
    yield
    server = fork_server.Popen.server
    if server is None:
        return  # every program is a fresh one
    left = dict(fork_server.read_at_import(environment()).items() - server.env.items())
    for name in left:
        del os.environ[name]  # the next test is not to blame
    if left:
        pytest.fail(f"the test leaves {left} behind in os.environ")


class ProcessorSeconds:
    """Lets the reports of a test say what it has cost, with its processes that have ended."""

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        item.stash[STARTED] = sum(os.times()[:4])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        item.user_properties[:] = [("cpu_s", sum(os.times()[:4]) - item.stash[STARTED])]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    """Write the costs."""
    yield
    path = config.getoption("--cpu-times")
    if path:
        write_costs(terminalreporter, Path(path))


def write_costs(terminalreporter: pytest.TerminalReporter, path: Path) -> None:
    """Write for each test: its processor seconds, those of its processes too, and its seconds."""
    cpu_s: Counter[str] = Counter()
    wall_s: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            cost = dict(report.user_properties).get("cpu_s", 0.0)  # none of a process that crashed
            cpu_s[report.nodeid] = max(cpu_s[report.nodeid], cost)
            wall_s[report.nodeid] += report.duration
    lines = [f"{cpu_s.total():8.2f} {wall_s.total():8.2f} all"]
    lines += [f"{cpu_s[name]:8.2f} {wall_s[name]:8.2f} {name}" for name, _ in cpu_s.most_common()]
    path.write_text("\n".join(["     cpu     wall test", *lines]) + "\n")


def pytest_collection_finish() -> None:
    """Compute with one thread, as the programs under test do.

    The process that hands out the tests to pytest-xdist collects none, and needs no torch.
    """
    import torch

    torch.set_num_threads(1)
    # All tests stay to the end: no collection needs to look at them.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one process at a time collect a file: the first one compiles it for all.

    pytest writes the asserts of a test anew and keeps the result, which is most of a collection. In
    a fresh clone all processes begin with the same file.
    """
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)
