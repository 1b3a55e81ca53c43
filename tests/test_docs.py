"""The documentation against the code: its commands, its links and the paths it names."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from samestep.errors import ConfigError
from samestep.hydra import build
from samestep.hydra.compose import check, help_text
from samestep.hydra.main import flags_of
from samestep.hydra.multirun import split_keys
from samestep.hydra.project import config_folders
from tests.conftest import CONFIGS, ROOT

EXECUTED = [  # tests/test_contract.py and test_tasks.py execute these, with files of their own
    ROOT / "docs/contract.md", ROOT / "docs/tasks.md",
]  # fmt: skip
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
EXPERIMENTS = [
    file for folder in config_folders() for file in sorted((folder / "experiment").glob("*.yaml"))
]
IS_TEMPLATE = (ROOT / "copier.yml").exists()  # not a copy of it
NOT_HERE = (  # the reader makes
    "configs/local", "configs/cluster/ours", "configs/model/squeeze", "src/pets", "tests/pets",
    "src/project/nets/squeeze", "src/project/squares",
)  # fmt: skip
if not IS_TEMPLATE:
    NOT_HERE += ("tests/",)  # tests that stay with the template
only_in_the_template = pytest.mark.skipif(not IS_TEMPLATE, reason="is about the template")
ACTIONS = "../../actions/"  # on GitHub, relative to a page at the top of the repository
STAND_INS = {
    "$seed": "0",
    "=squeeze": "=cnn",
    "=$IMAGE": "=ghcr.io/me/project:1",
}  # for what a command gets from the reader


def code_of(page: str) -> str:
    """The lines of all code blocks of a Markdown page, and each piece of code in its text."""
    fence = r"^```.*?\n(.*?)^```$"
    blocks = re.findall(fence, page, re.M | re.S)
    text = re.sub(fence, "", page, flags=re.M | re.S)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    text = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return "\n".join([*blocks, *indented, *re.findall(r"`([^`]+)`", text)])


def commands_of(code: str) -> list[tuple[str, str]]:
    """What follows ``train.py`` in each command, and the error that is shown below it."""
    found = []
    lines = [line.strip().removeprefix("$ ") for line in code.splitlines()]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        for name, value in STAND_INS.items():
            line = line.replace(name, value)
        command = re.split(r" {2,}| \[", line)[0]  # less what explains it
        for part in re.split(r"; |&&", command):
            # `samestep launch` is rendered and checked by tests/test_docs_commands.py.
            starts = re.match(r"(do )?([A-Z_]+=\S+ )*(python|torchrun .*) train\.py( |$)", part)
            if starts:
                error = below if below.startswith("error: ") else ""
                found.append((part[starts.end() :], error))
    return found


SOURCES = {
    **{
        page.relative_to(ROOT).as_posix(): code_of(page.read_text())
        for page in PAGES
        if page not in EXECUTED
    },
    **{path.stem: re.sub("^# *", "", path.read_text(), flags=re.M) for path in EXPERIMENTS},
    "--help": help_text(),
    "train.py": (ROOT / "train.py").read_text().split('"""')[1],
}
COMMANDS = [(source, *command) for source, code in SOURCES.items() for command in commands_of(code)]


@pytest.mark.parametrize(("words", "error"), sorted({tuple(words) for _, *words in COMMANDS}))
def test_a_command_does_what_is_said(words: str, error: str):
    flags = flags_of(shlex.split(words, comments=True))
    said = ""
    try:
        overrides = flags.overrides
        if flags.multirun:
            _, overrides = split_keys(overrides)
        build.check_arguments(check(overrides, multirun=flags.multirun))
    except ConfigError as refused:
        said = f"error: {refused}"
    assert said.startswith(error.removesuffix("..."))
    assert bool(said) == bool(error), said


@only_in_the_template
def test_commands_are_found_where_there_are_some():
    talking = {source for source, *_ in COMMANDS}
    assert {"README.md", "--help", "train.py"} < talking
    assert {path.stem for path in EXPERIMENTS} < talking
    assert [source for source, *_ in COMMANDS].count("--help") == 5  # usage and four examples


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith(("https://", ACTIONS)):
            continue
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        assert path.is_file(), link
        # A picture has no headings.
        if not anchor:
            continue
        headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, link
    for name in re.findall(r"(?<![\w/])(?:src|configs|scripts|docs|tests|k8s)/[\w./-]*\w", text):
        is_made = name.startswith(NOT_HERE) or page in EXECUTED  # whose files the reader writes
        exists = (ROOT / name).exists() or (page.parent / name).exists()
        assert exists or is_made, name


@only_in_the_template
def test_every_promise_names_its_tests():
    page = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", page.partition("## Limits")[0], re.M)[1:]
    assert len(rows) >= 30
    for proofs in rows:
        names = re.findall(r"`([\w/]+\.py)`", proofs)
        assert names or "lab" in proofs, proofs
        for name in names:
            assert any((ROOT / at / name).is_file() for at in ("library/tests", "tests")), name


@only_in_the_template
def test_the_summary_of_the_faults_counts_every_experiment():
    results = (ROOT / "labs/faults/results.md").read_text()
    survived = re.findall(r"^\| [^|]+ \| [^|]+ \| (yes|\*\*no)", results, re.M)
    assert set(survived) == {"yes"}
    page = (ROOT / "docs/reliability.md").read_text().partition("## Measured")[2]
    assert f"[All {len(survived)} experiments]" in page
    assert f" {len(survived)} measured faults" in (ROOT / "README.md").read_text()
    repeated = re.findall(r"^\| SIG(?:TERM|INT).*\| (\d+) \|$", results, re.M)
    assert len(repeated) > 20
    assert set(repeated) == {"0"}


@only_in_the_template
def test_supported_versions_are_those_of_the_library():
    project = tomllib.loads((ROOT / "library/pyproject.toml").read_text())["project"]
    bounds = {"Python": project["requires-python"]}
    for line in [*project["dependencies"], *project["optional-dependencies"]["hydra"]]:
        name, bound = re.match(r"([\w-]+)(\S+?)(,!=|$)", line).groups()[:2]
        bounds[name] = bound
    page = (ROOT / "docs/install.md").read_text()
    head, row = re.findall(rf"^\| (samestep|{project['version']}) \| (.*) \|$", page, re.M)
    table = dict(zip(head[1].split(" | "), row[1].split(" | "), strict=True))
    assert len(table) == 5
    assert table.items() <= bounds.items()


@only_in_the_template
def test_every_cluster_says_how_it_was_seen():
    """One table has what it needs; the other how it was seen, and by which command."""
    from samestep.hydra.project import choices_of

    page = (ROOT / "docs/clusters/README.md").read_text()
    targets = {*choices_of(CONFIGS)["cluster"]} - {"local"}
    needs = re.findall(r"^\| \[`(\w+)`\]\([\w.#-]+\) \| [^|]+ \| [^|]+ \|$", page, re.M)
    assert set(needs) == targets
    seen = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| ([^|]+) \|$", page, re.M))
    assert seen.keys() == targets
    for path in re.findall(r"pytest ([\w/.]+)", page):
        assert (ROOT / path).exists(), path


def test_the_tour_passes_every_place():
    """Each file of yours, and each part of what is kept: its folders list their own files."""
    tour = (ROOT / "docs" / "code.md").read_text()
    yours = [
        path for path in (ROOT / "src/project").rglob("[!_]*.py") if path.parent.name != "nets"
    ]
    kept = (ROOT / "library/src/samestep").glob("[!_]*[!d]")  # not py.typed
    names = [path.relative_to(ROOT / "src").as_posix() for path in yours]
    names += [path.relative_to(ROOT / "library/src").as_posix() for path in kept]
    assert [name for name in names if name not in tour] == []
    lengths = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", tour, re.M)
    assert len(lengths) == 5
    for name, length in lengths:
        assert abs(len((ROOT / name).read_text().splitlines()) - int(length)) <= 3, name


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_opens_with_what_was_measured(path: Path):
    header = path.read_text().partition("defaults:")[0]
    assert f" experiment={path.stem} " in header
    if "???" in path.read_text():
        return  # it needs data of the reader, and has no result of ours
    result = r"test/(accuracy|bits_per_character): mean \d\.\d+"
    for fact in (r"CPU cores|GPU", r"\d s a run", result, r"n = \d+ seeds"):
        assert re.search(fact, header), fact


@only_in_the_template
def test_what_a_user_gets_names_no_page_of_this_repository():
    """Neither a copy nor an installed library has docs/."""
    found = []
    for folder in ("library/src", "scripts", "src", "configs", "k8s"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".yaml") and re.search(r"(?<![\w./])docs/", file.read_text()):
                found.append(file.relative_to(ROOT))
    assert found == []
