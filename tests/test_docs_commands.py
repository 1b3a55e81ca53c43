"""Every command that README.md and docs/ print: typed in a clone, or there is a reason.

``train.py`` is composed and checked by tests/test_docs.py, ``samestep launch`` is rendered and
checked here, and the programs of Swarm and elastic pods run in
tests/samestep/launch/test_printed_commands.py. NOT_TYPED says why the others are not typed here.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.hydra.compose import check
from samestep.launch import check as rules
from samestep.launch import main, render, submissions
from samestep.sweep import settings
from tests.clone import clone_working_tree
from tests.conftest import ROOT
from tests.printed_commands import (
    PAGES,
    Command,
    find_commands,
    find_lines,
    make_quick,
    type_line,
)
from tests.s3_server import s3_server, use_bucket

pytestmark = pytest.mark.nightly

TYPED_ELSEWHERE = {  # with files and changes of the reader
    "docs/start.md": "tests/test_start.py",
    "docs/tasks.md": "tests/test_tasks.py",
    "docs/contract.md": "tests/test_contract.py",
}
NOT_TYPED = {  # pattern of a line: why it is not typed, or where
    # It needs a cluster.
    r"samestep launch(?!.*--(render|check))|samestep (status|logs|cancel) |-m cluster=":
        "a cluster; rendered and checked here",
    r"samestep sweep .*cluster=": "a cluster; tests/samestep/sweep/test_cluster.py",
    r"kubectl (create|apply|taint|delete|get) |kind |sudo install ": "a cluster or a server",
    r"docker (swarm|node|secret) |docker compose ": "a swarm; seen on Docker 20.10",
    r"srun ": "Slurm; tests/samestep/launch/test_slurm_cluster.py",
    r"labs/servers/build.sh|labs.servers |/tmp/servers/|-m servers":
        "servers; .github/workflows/nightly.yml",
    r"labs.e2e": ".github/workflows/e2e.yml",
    r"python -m samestep.launch.entrypoint": "pods; tests/samestep/launch/test_entrypoint.py",
    r"node-rank=N|NODE_0": "several machines; tests/samestep/launch/test_printed_commands.py",
    # It needs a device, or what is downloaded.
    r"^(?!.*samestep launch).*(data=cifar10|data.mirror=|prepare_data.py)":
        "a download; the tests of samestep.download_once",
    r"nproc-per-node=8": "GPUs; composed by tests/test_docs.py",
    r"docker build|docker push|printf |docker run ": "Docker; tests/test_image.py",
    r"pip install |pyflyte run ": "packages; tests/scripts/test_flyte.py",
    r"data=hf|data=lance data.root=data/pets|datasets\.|convert hub ":
        "the package datasets; tests/examples/test_tables.py",
    r"wandb sync ": "a server; the tests of the library, test_loggers.py",
    # It takes long, or never ends.
    r"samestep verify ": "minutes; tests/samestep/with_template/test_verify_of_template.py",
    r"make |git clone ": "it installs; tests/test_make.py",
    r"uvx copier |git commit ": "a copy; tests/test_copies.py",
    r"tensorboard --logdir": "a server; tests/project/test_trackers.py",
    r"samestep report --serve": "a server; the tests of the library, report/test_live.py",
    r"samestep sweep (?!.*cluster=)": "minutes; tests/samestep/sweep/test_search.py",
    r"^python train.py -m ": "a new process for each run; docs/grids.md has one that is typed",
    r"--grid mine": "a grid; docs/grids.md has one that is typed",
    r"python -m http.server": "a server; tests/samestep/launch/test_swarm.py",
    r"samestep completion": "three shells; tests/test_completion.py",
    r"^(RUN_ID=\S+|IMAGE=\S+)$": "a variable",
}  # fmt: skip
BEFORE = {  # what a page expects of the reader: its runs
    "docs/report.md": (
        "RUN_ID=mine python train.py", "RUN_ID=other python train.py",
    ),
}  # fmt: skip
NOT_COMMANDS = {  # first words of blocks that show something else
    ("README.md", "Run:"), ("README.md", "train.py"), ("README.md", "runs/<run_id>/"),
    ("README.md", "undisturbed"),
    ("docs/clusters/entrypoint.md", "entrypoint:"),
    ("docs/report.md", "Note:"),
}  # fmt: skip
STAND_INS = {
    "$IMAGE": "ghcr.io/me/project:3f2a1b4c5d6e", "$seed": "0", "<id>": "mine", "<other>": "other",
    "runs/<sweep>": "runs", "/volume/": "",
}  # fmt: skip
OWN_FILES = ROOT / "docs/tasks.md"  # tests/test_tasks.py executes it
BLOCKS = [block for page in PAGES if page != OWN_FILES for block in find_commands(page) if block]
COMMANDS = [
    command
    for block in BLOCKS
    if (block[0].page, block[0].words[0]) not in NOT_COMMANDS
    for command in block
]


def of_program(*programs: str):
    """The commands of these programs, each once."""
    found = {command.text: command for command in COMMANDS if command.program in programs}
    return pytest.mark.parametrize("command", found.values(), ids=found.keys())


def arguments_of(command: Command) -> list[str]:
    text = "\n".join(command.arguments)
    for name, value in STAND_INS.items():
        text = text.replace(name, value)
    return text.split("\n") if text else []


LINES: dict[Path, list[tuple[str, str]]] = {}
PAGE_OF_LINE: dict[str, Path] = {}
"""The first page that has a line, and on which it is typed."""

for path in PAGES:
    LINES[path] = []
    name = path.relative_to(ROOT).as_posix()
    for block in find_lines(path):
        if block and (name, block[0][0].split()[0]) not in NOT_COMMANDS:
            LINES[path] += block
            for line, _ in block:
                PAGE_OF_LINE.setdefault(line, path)


def to_type(page: Path) -> list[tuple[str, str]]:
    """The lines of a page that are typed, and the errors that are shown."""
    if page.relative_to(ROOT).as_posix() in TYPED_ELSEWHERE:
        return []
    found = []
    for line, error in LINES[page]:
        # A run without a name is the same on all pages.
        is_known = line.startswith("python train.py") and PAGE_OF_LINE[line] != page
        if not is_known and not reasons_of(line):
            found.append((line, error))
    return found


def before(page: Path) -> list[tuple[str, str]]:
    """What the reader has typed before."""
    name = page.relative_to(ROOT).as_posix()
    if name == "docs/large.md":
        # The images, and their tables.
        return to_type(ROOT / "examples/tables/README.md")[:3]
    return [(line, "") for line in BEFORE.get(name, ())]


def reasons_of(line: str) -> set[str]:
    return {pattern for pattern in NOT_TYPED if re.search(pattern, line)}


def test_reasons_are_used_and_name_tests_that_exist():
    used = {reason for lines in LINES.values() for line, _ in lines for reason in reasons_of(line)}
    assert NOT_TYPED.keys() - used == set()
    for reason in [*NOT_TYPED.values(), *TYPED_ELSEWHERE.values()]:
        for path in re.findall(r"(?:tests|docs|examples|\.github)/[\w/.]+\w", reason):
            assert (ROOT / path).is_file(), path
    first_words = {(block[0].page, block[0].words[0]) for block in BLOCKS}
    assert first_words >= NOT_COMMANDS


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_working_tree(tmp_path_factory.mktemp("reader") / "project")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a reader with a bucket."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as variables:
        with pytest.MonkeyPatch.context() as here:
            use_bucket(variables, "bucket", here)
        yield variables


@pytest.mark.parametrize(
    "page", [page for page in PAGES if to_type(page)], ids=lambda page: page.parent.name + page.stem
)
def test_a_page_is_typed_in_a_clone(page: Path, clone: Path, request: pytest.FixtureRequest):
    subprocess.run(["git", "clean", "-fdxq"], cwd=clone, check=True)
    make_quick(clone)
    lines = [*before(page), *to_type(page)]
    variables = {"WANDB_MODE": "offline", "KUBECONFIG": "/dev/null"}
    if "s3://" in str(lines):
        variables |= request.getfixturevalue("store")
    for line, error in lines:
        for name, value in STAND_INS.items():
            line = line.replace(name, value)
        done = type_line(line, clone, **variables)
        assert done.returncode == (2 if error else 0), (line, done.stdout, done.stderr)
        assert error.removesuffix("...") in done.stderr, line


def numbers_of_ranks(cfg) -> list[int]:
    """How many ranks a run may have: as many as it gets, if its nodes come and go."""
    cluster, devices = cfg.cluster, cfg.trainer.devices
    if "devices_per_node" in cluster:
        return [sum(cluster.devices_per_node)]
    if "max_nodes" in cluster:
        return [devices * nodes for nodes in range(cluster.min_nodes, cluster.max_nodes + 1)]
    return [devices * cfg.trainer.num_nodes]


@of_program("samestep launch")
def test_what_is_launched_has_no_errors(command: Command, monkeypatch: pytest.MonkeyPatch):
    words = arguments_of(command)
    overrides = [word for word in words if not word.startswith("--")]
    flags = set(words) - set(overrides)
    assert flags <= {f"--{flag}" for flag in main.FLAGS}
    monkeypatch.setenv("RUN_ID", command.variables.get("RUN_ID", ""))
    cfg, documents = main.prepare(overrides, is_data="--data" in flags)
    assert list(rules.faults(cfg, documents)) == []
    if flags <= {"--data"}:
        assert list(rules.check_examples(cfg)) == []
    for number in numbers_of_ranks(cfg):
        assert cfg.data.global_batch_size >= number, f"{number} ranks"
    if "commands" in cfg.cluster:
        assert render.command(cfg, overrides, "submit")


@of_program(*(f"samestep {name}" for name in main.COMMANDS))
def test_what_is_done_with_a_run_names_it_and_at_most_its_cluster(command: Command):
    name, *overrides = arguments_of(command)
    assert "=" not in name
    if overrides:
        assert submissions.cluster_of(overrides)
        check(overrides)


@of_program("samestep sweep")
def test_a_search_is_right_as_printed(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", command.variables.get("RUN_ID", ""))
    words = arguments_of(command)
    chosen = [word.removeprefix("sweep=") for word in words if word.startswith("sweep=")]
    search = settings.read(words)
    assert search.name == (command.variables.get("RUN_ID") or chosen[0].replace("_", "-"))


@of_program("scripts/prepare_data.py")
def test_the_data_that_are_prepared_are_a_choice(command: Command):
    assert check(arguments_of(command)).data.dataset._partial_


def find_targets(folder: Path) -> list[str]:
    return re.findall(r"^([\w-]+):.*##", (folder / "Makefile").read_text(), re.M)


def test_targets_of_make_and_extras_of_pip_exist():
    targets = {folder: find_targets(ROOT / folder) for folder in (".", "labs")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [command for command in COMMANDS if command.program in ("make", "pip")]
    for command in found:
        if command.program == "make":
            in_labs = command.words[1:3] == ["-C", "labs"]
            folder, target = ("labs", command.words[3]) if in_labs else (".", command.words[1])
            assert target in targets[folder], command.text
        elif "[" in command.text:  # other packages are those of pip
            _, _, extra = command.words[-1].rstrip("]").partition("[")
            assert command.words == ["pip", "install", f"{project['name']}[{extra}]"]
            assert extra in project["optional-dependencies"]
    assert {command.program for command in found} == {"make", "pip"}
