"""How all tests are run: in levels, programs are forked, nothing is composed twice, costs counted.

The ``conftest.py`` of the root takes these hooks, for the tests of the library too.
"""

import fcntl
import functools
import gc
import itertools
import os
import pickle
import re
import signal
import sys
import types
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
    """Start the Python programs under test from a process that has imported the libraries."""
    config.pluginmanager.register(ProcessorSeconds())
    config.pluginmanager.register(levels)
    # A shell ignores Ctrl-C in what it starts behind ``&``, and so would all programs under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Containers often set this. Hundreds of processes would compile the same files.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["GOGC"] = "off"  # kubectl never lives long enough to need its garbage collector
    fork_server.install(environment())
    hydra.compose = compose_once
    ConfigRepository.load_config = load_once
    omegaconf.base.parse = functools.cache(omegaconf.base.parse)


original_compose = hydra.compose
OUR_FOLDERS = {str(path) for path in (ROOT / "configs", *ROOT.glob("examples/*/configs"))}


def compose_once(
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    return_hydra_config: bool = False,
) -> DictConfig:
    """``hydra.compose``, which remembers what it has composed of this repository's folders.

    No test writes there, so the result depends on the overrides only.
    """
    sources = GlobalHydra.instance().config_loader().get_sources()
    folders = [source.path for source in sources if source.scheme() == "file"]
    for override in overrides:
        if override.startswith("hydra.searchpath"):
            folders += re.findall(r"file://([^'\],]+)", override)
    if not {*folders} <= OUR_FOLDERS:
        return original_compose(config_name, list(overrides), return_hydra_config)
    composed = compose_ours(config_name, tuple(overrides), return_hydra_config)
    copied: DictConfig = pickle.loads(composed)  # deepcopy is several times slower
    return copied


@functools.lru_cache(maxsize=1000)
def compose_ours(
    config_name: str | None, overrides: tuple[str, ...], return_hydra_config: bool
) -> bytes:
    return pickle.dumps(original_compose(config_name, list(overrides), return_hydra_config))


original_load = ConfigRepository.load_config
LOADED: dict[object, bytes] = {}


def load_once(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Hydra's reader of a file, a third of a composition, which remembers what it has read."""
    key = [config_path]
    for source in repository.get_sources():
        path = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
        if source.scheme() == "file" and path.exists():
            status = path.stat()
            key.append(f"{path} {status.st_mtime_ns} {status.st_size}")
    if len(key) == 1:
        return original_load(repository, config_path)
    if tuple(key) not in LOADED:
        LOADED[tuple(key)] = pickle.dumps(original_load(repository, config_path))
    loaded: ConfigResult | None = pickle.loads(LOADED[tuple(key)])
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
    of_server = fork_server.read_at_import(server.env)
    left = dict(fork_server.read_at_import(environment()).items() - of_server.items())
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
    from lightning.fabric.utilities import registry

    torch.set_num_threads(1)
    # Each is an eighth of a short run: the look into all packages for one that brings callbacks,
    # and the stack traces that torch keeps with each seed, for errors of devices.
    registry.entry_points = functools.cache(registry.entry_points)
    for module in (torch.cuda, torch.xpu, torch.mtia):
        module.traceback = types.SimpleNamespace(format_stack=list)
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
