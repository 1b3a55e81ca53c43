"""The rules of the two distributions: the template is yours, ``library/`` is kept."""

import ast
import functools
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import samestep
from labs.count_code import PATH_TO_FIRST_STEP
from tests.conftest import ROOT

SRC = ROOT / "src"
LIBRARY = ROOT / "library/src/samestep"
SAMESTEP = sorted(LIBRARY.rglob("*.py"))
OURS = [
    *sorted(SRC.rglob("*.py")),
    *SAMESTEP,
    ROOT / "train.py",
    *sorted((ROOT / "scripts").glob("*.py")),
    *sorted((ROOT / "examples").glob("*/*.py")),
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def place(path: Path, node: ast.AST | None = None) -> str:
    """Where something stands, as an editor opens it."""
    line = getattr(node, "lineno", 1)
    return f"{path.relative_to(ROOT)}:{line}"


def check_none(wrong: Iterable[str]) -> None:
    if lines := list(wrong):
        pytest.fail("\n".join(lines), pytrace=False)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Full names that a file imports anywhere, also within functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place(path, node)}: imports are written in full"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


# -- Imports go one way ----------------------------------------------------------------------------

LEVELS = [
    ["option_names"],
    ["config_keys", "errors", "lightning_names", "mlflow_runs", "run_spec", "tracker"],
    ["versions"],
    ["ranks"],
    ["command_line", "download", "losses", "metrics"],
    ["data", "run"],
    ["heap", "plugin"],
    ["grid", "loggers"],
    ["callbacks"],
    ["loops"],
    ["arguments", "fit_checks"],
    ["plugins"],
    ["report"],
    ["node"],
    ["verify"],
    ["trainer"],
    ["hydra", "lightning_patch"],
    ["launch"],
    ["completion", "doctor", "loading", "model_card", "script", "sweep"],
    ["model_files"],
    ["evaluate", "export", "predict"],
    ["cli"],
    ["__main__"],
]
"""Parts of samestep. Each part may import from itself and from the levels before its own."""


OUTSIDE_OF_SAMESTEP = {"project", "scripts", "train", "tests", "labs"}


def test_samestep_imports_nothing_of_the_project():
    check_none(
        f"{place(path, node)} imports {name}"
        for path in SAMESTEP
        for name, node in imports(path)
        if name.split(".")[0] in OUTSIDE_OF_SAMESTEP
    )


def test_tests_of_the_library_need_no_template():
    check_none(
        f"{place(path, node)} imports {name}"
        for path in sorted((ROOT / "library/tests").rglob("*.py"))
        for name, node in imports(path)
        if name.split(".")[0] in {*OUTSIDE_OF_SAMESTEP, "hydra", "omegaconf"}
    )


CORE = {
    "errors",
    "config_keys",
    "loops",
    "losses",
    "metrics",
    "run_spec",
    "ranks",
    "data",
    "run",
    "node",
    "tracker",
    "mlflow_runs",
    "loggers",
    "callbacks",
    "grid",
    "arguments",
    "fit_checks",
    "lightning_patch",
    "option_names",
    "plugin",
    "plugins",
    "trainer",
    "verify",
}
"""What any Lightning project can use: it must not need the framework of a template."""


def test_the_core_needs_neither_hydra_nor_images():
    banned = {"hydra", "omegaconf", "torchvision", "jinja2", "matplotlib", "optuna"}
    check_none(
        f"{place(path, node)} imports {name}"
        for path in SAMESTEP
        if path.relative_to(LIBRARY).parts[0].removesuffix(".py") in CORE
        for name, node in imports(path)
        if name.split(".")[0] in banned
    )


def test_the_callback_of_predictions_is_imported_by_name_only():
    """A configuration or a program names it: the Trainer does without it."""
    check_none(
        f"{place(path, node)} imports {name}"
        for path in SAMESTEP
        for name, node in imports(path)
        if f"{name}.".startswith("samestep.callbacks.predictions.")
    )


def test_the_levels_name_every_part_of_samestep():
    parts = {path.relative_to(LIBRARY).parts[0].removesuffix(".py") for path in SAMESTEP}
    assert parts - {"__init__"} == {part for level in LEVELS for part in level}


def test_imports_within_samestep_go_one_way():
    level_of = {part: number for number, level in enumerate(LEVELS) for part in level}
    wrong = []
    for path in SAMESTEP:
        own = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        for name, node in imports(path):
            package, *rest = name.split(".")
            if package != "samestep" or rest[0] == own or own == "__init__":
                continue
            if level_of[rest[0]] >= level_of[own]:
                wrong.append(f"{place(path, node)} imports {name}")
    check_none(wrong)


NEVER = {"cli", "grid", "hydra", "launch", "node", "plugins", "report", "sweep", "verify"}
"""What the Trainer imports neither at once nor within a function."""


def test_the_trainer_imports_no_plugin_and_no_satellite():
    seen, todo = set[str](), ["samestep.trainer"]
    while todo:
        name = todo.pop()
        # A name in a module, or a module of a package.
        path = LIBRARY.parent / f"{name.replace('.', '/')}.py"
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for imported, _ in imports(path):
            todo += [imported, imported.rpartition(".")[0]]
    assert len(seen) > 50
    assert [name for name in sorted(seen) if name.split(".")[1] in NEVER] == []


def test_a_net_is_plain_torch():
    """A net can be read, and copied, without knowing anything else of this repository."""
    for path in sorted((SRC / "project/nets").glob("*.py")):
        used = {name.split(".")[0] for name, _ in imports(path)}
        assert used.isdisjoint({"project", "samestep", "lightning", "hydra"}), place(path)


# -- The template needs what is documented, and no more --------------------------------------------

TEMPLATE = [
    *sorted(SRC.rglob("*.py")),
    ROOT / "train.py",
    *sorted((ROOT / "scripts").glob("*.py")),
]
MOST_PUBLIC_NAMES = 20
PUBLIC = re.findall(r"^::: (samestep\.\S+)", (ROOT / "docs/reference.md").read_text(), re.M)
"""The names of docs/reference.md, where they are defined."""


def test_the_template_imports_public_names_only():
    """From ``samestep`` itself, so a copy can be updated apart from the library."""
    top = {f"samestep.{name}": f"{module}.{name}" for name, module in samestep.MODULES.items()}
    used = set()
    wrong = []
    for path in TEMPLATE:
        for name, node in imports(path):
            if not name.startswith("samestep."):
                continue
            used.add(name)
            if top.get(name) not in PUBLIC:
                wrong.append(f"{place(path, node)} imports {name}")
    check_none(wrong)
    assert len(used) <= MOST_PUBLIC_NAMES, sorted(used)


def test_every_name_of_samestep_is_documented():
    assert [
        f"{module}.{name}"
        for name, module in samestep.MODULES.items()
        if f"{module}.{name}" not in PUBLIC
    ] == []


# -- samestep does not know the task ---------------------------------------------------------------

WORDS_OF_THE_TASK = {
    "accuracies", "accuracy", "classes", "digits", "image", "images", "label", "labels",
}  # fmt: skip

ALLOWED_WORDS = {
    # Container images, and labels of Kubernetes objects.
    "launch": {"image", "images", "label", "labels"},
    # Container images: the commit that one was built from, and one image for all ranks.
    "run/records.py": {"image"},
    "plugins/preflight.py": {"image"},
    "hydra/rules.py": {"image"},  # cluster.image_pull_policy
    "cli.py": {"image"},  # the command that builds a container image
    # A table of predictions names the most likely classes, where the data have names for them.
    "predict.py": {"classes"},
    # A column of a test's predictions, and names for the numbers of its classes.
    "callbacks/predictions.py": {"classes", "image", "images"},
    # Those of Python.
    "heap": {"classes"},
    "arguments.py": {"classes"},
    # What a user numbers in the order of a set.
    "ranks/environment.py": {"classes"},
    # The Hugging Face Hub calls a task image-classification.
    "model_card.py": {"classes", "image", "images"},
}


def words(text: str) -> list[str]:
    """Lower-case words of a text or a name: ``ImageSet`` and ``image_set`` have two each."""
    text = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return re.findall(r"[a-z]+", text.lower())


def test_samestep_has_no_words_of_images():
    wrong = []
    for path in SAMESTEP:
        inside = path.relative_to(LIBRARY).as_posix()
        allowed = ALLOWED_WORDS.get(inside) or ALLOWED_WORDS.get(inside.split("/")[0]) or set()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            found = WORDS_OF_THE_TASK.intersection(words(token.string)) - allowed
            if found:
                line = path.relative_to(ROOT), token.start[0]
                wrong.append(f"{line[0]}:{line[1]} says {', '.join(sorted(found))}")
    check_none(wrong)


# -- Private names of other libraries stand in few files -------------------------------------------

PATCHES = [
    LIBRARY / name
    for name in (
        "arguments.py",
        "callbacks/checkpoints.py",
        "callbacks/data_resume.py",
        "callbacks/rng.py",
        "callbacks/slice_weighting.py",
        "fit_checks.py",
        "heap/stream.py",
        "loops.py",
        "plugins/monitor_check.py",
        "plugins/wall_time.py",
        "node/torch_agent.py",
        "plugins/checks.py",
        "plugins/epoch_means.py",
        "plugins/fast_step.py",
        "plugins/fsdp.py",
        "plugins/trackers.py",
        "ranks/compat.py",
        "ranks/ddp.py",
        "ranks/epoch_logs.py",
        "ranks/epoch_sums.py",
        "ranks/gradients.py",
        "ranks/process_group.py",
        "ranks/virtual.py",
        "run/weights.py",
        "plugins/starting.py",
    )
]
PUBLIC_IN_SPITE = {
    "_exit",  # os._exit ends a process without cleaning up: documented
    "_run_exitfuncs",  # of atexit: the only way to its functions where a process ends by os._exit
    "_python_dispatch",  # torch's documentation names TorchDispatchMode there
    "_replace", "_asdict", "_fields",  # methods of a NamedTuple: documented
}  # fmt: skip


def is_private(name: str) -> bool:
    """Whether it begins with one underscore; names such as ``_target_`` belong to Hydra's users."""
    return name.startswith("_") and not name.endswith("_") and name not in PUBLIC_IN_SPITE


def own_private_names() -> set[str]:
    """Private names that this repository defines itself."""
    found = set()
    for node in (node for path in OURS for node in nodes(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
    return found


def private_names(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Private names that a file imports, or looks up in an object."""
    for name, node in imports(path):
        yield from ((part, node) for part in name.split(".") if is_private(part))
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            # super()._name is a method of the other library, even if a class of ours overrides it.
            yield f"super().{node.attr}" if is_super(node.value) else node.attr, node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield str(name.value), node


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def test_private_names_of_other_libraries_stand_in_few_files():
    own = own_private_names()
    check_none(
        f"{place(path, node)} uses {name}"
        for path in OURS
        if path not in PATCHES
        for name, node in private_names(path)
        if name not in own
    )


@pytest.mark.parametrize("package", ["lightning", "hydra-core", "torch"])
def test_libraries_that_are_patched_have_an_upper_version(package: str):
    """A new minor version is tried on purpose, with the tests of ``compat``."""
    (line,) = (
        line for line in PYPROJECT["project"]["dependencies"] if re.match(rf"{package}[^\w-]", line)
    )
    assert re.search(r",<\d", line), line


# -- Small pieces ----------------------------------------------------------------------------------


FLYTE = ROOT / "scripts/flyte_workflow.py"
"""Flyte imports it by its path; the processes that it starts must find it by its name."""
PROJECT = LIBRARY / "hydra/project.py"
"""Makes the user's code importable for commands and scripts."""


def test_sys_path_is_changed_in_doorways_only():
    check_none(
        place(path, node)
        for path in OURS
        if path not in (ROOT / "train.py", FLYTE, PROJECT)
        for node in nodes(path)
        # Such as sys.path.insert and sys.path[0]; it may be read as a whole.
        if isinstance(node, (ast.Attribute, ast.Subscript))
        and ast.unparse(node.value) == "sys.path"
    )


def test_the_linters_hold_their_rules_everywhere():
    lint, mypy = PYPROJECT["tool"]["ruff"]["lint"], PYPROJECT["tool"]["mypy"]
    assert "C901" in lint["select"]
    assert lint["mccabe"]["max-complexity"] == 10
    exempt = [files for files, rules in lint["per-file-ignores"].items() if "C901" in rules]
    assert exempt == ["{library/tests,tests,examples/*/tests}/**"]
    assert "C901" not in lint["ignore"]
    assert [place(path) for path in OURS if "noqa: C901" in path.read_text()] == []
    assert mypy["strict"]
    assert mypy["files"] == ["src", "library/src", "examples"]


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in SAMESTEP}), ids=lambda folder: folder.name
)
def test_a_folder_says_in_which_order_to_read_it(folder: Path):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert len(text.splitlines()) >= 3
    names = {path.stem for path in folder.glob("[!_]*.py")}
    names |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert [name for name in sorted(names) if f"``{name}``" not in text] == []


LONG_SCRIPTS = {"new.py", "flyte_workflow.py"}
"""A tool that writes files itself, and the workflow of Flyte."""
MAX_LINES = 55  # about 40, and the help text


def test_scripts_are_doorways():
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / "scripts").glob("*.py")
    }
    long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert long.keys() <= LONG_SCRIPTS, long


def test_the_path_to_the_first_step_is_short():
    paths = [path for name in PATH_TO_FIRST_STEP if (path := ROOT / name).exists()]
    assert sum(len(path.read_text().splitlines()) for path in paths) < 1_000
    doorway, *pages = paths
    used = {name.split(".")[0] for name, _ in imports(doorway)}
    assert used <= {"sys", "pathlib", "project", "samestep"}
    assert all(page.is_relative_to(SRC / "project") for page in pages)
