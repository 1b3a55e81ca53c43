"""Copies of the template, made and updated by Copier itself."""

import ast
import functools
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jinja2
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.clone import clone_working_tree, commit, git
from tests.conftest import NO_PICTURES, ROOT, run, run_pytest

pytestmark = pytest.mark.nightly

TRUST = {"unsafe": True, "defaults": True, "quiet": True}  # Copier calls .copier/wheel.py


@pytest.fixture(autouse=True)
def quick_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copier compiles each part of each path anew, and starts git for each file on Windows' behalf.

    That is most of the time of a copy. Here equal parts are compiled once, and git is not asked.
    """
    # To import it above would cost each process of pytest-xdist a second.
    from copier._jinja_ext import get_yield_context
    from copier._main import Worker

    compile_anew = jinja2.Environment.from_string
    remember = functools.cache(compile_anew)

    def from_string(env: jinja2.Environment, source: str) -> jinja2.Template:
        if "yield" in source:
            return compile_anew(env, source)
        # To compile anything ends the effect of the last `yield`.
        context = get_yield_context(env)
        context.yield_name = context.yield_iterable = None
        return remember(env, source)

    monkeypatch.setattr(jinja2.Environment, "from_string", from_string)
    monkeypatch.setattr(Worker, "_sync_git_index_executable_bit", lambda *arguments: None)
    for who in ("AUTHOR", "COMMITTER"):  # `update` commits in a folder of its own
        monkeypatch.setenv(f"GIT_{who}_NAME", "test")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "test@localhost")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This working tree, as the first version of a template."""
    folder = clone_working_tree(tmp_path_factory.mktemp("versions") / "template", "v1.0.0")
    # Copier renders the name of every file, also of those in .git: there are a thousand objects.
    git(folder, "gc", "--quiet")
    return folder


def make_copy(template: Path, to: Path, **answers: str | list[str]) -> Path:
    """A committed copy with these tasks, clusters and loggers."""
    import copier

    data = {"name": "bird-songs", "author": 'Ada "Countess" Lovelace', **answers}
    copier.run_copy(str(template), to, data=data, **TRUST)
    git(to, "init", "--quiet")
    commit(to)
    return to


def tell_address(copy: Path, template: Path) -> None:
    """Write down where the template is, as README.md says for one on this machine."""
    with (copy / ".copier-answers.yml").open("a") as file:
        file.write(f"_src_path: {template}\n")
    commit(copy)


def check_style(copy: Path, *folders: str) -> None:
    """Run the linters in the copy; or, from there, in these folders, each with its own settings."""
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *folders]
        done = subprocess.run(ruff, cwd=copy, check=False)
        assert done.returncode == 0


def check(copy: Path, *tests: str) -> str:
    """Run the linters, and some tests, within the copy; return what pytest says."""
    check_style(copy)
    tested = run_pytest(copy, *tests)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    # Without the cache of `make lint`, which .ci/run has run before, mypy takes 40 s here. It is of
    # use only with the options of the template, which are stricter than those of a copy.
    if (cache := ROOT / ".mypy_cache").exists():
        options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={cache}", "src"]
        call(copy, "-m", "mypy", *options)
    return tested.stdout


def call(copy: Path, *words: str) -> str:
    """What a program of the copy prints, if it succeeds."""
    done = run(*words, cwd=copy, PYTHONPATH=f"{copy / 'src'}:{copy}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_old_names(copy: Path) -> list[str]:
    """Lines that have the template's name, a page that the copy lacks, or a statement of Copier."""
    words = r"^project: project|name = .project|example\.com/project|/docs/|\bdocs/\w+\.md|\[%|\[= "
    found = []
    for name in git(copy, "ls-files").splitlines():
        if name.startswith(("library/", "vendor/", "requirements")) or name.endswith(".xz"):
            continue
        lines = (copy / name).read_text(errors="replace").splitlines()
        found += [f"{name}: {line}" for line in lines if re.search(words, line)]
    return found


def own_files(copy: Path, *suffixes: str) -> list[Path]:
    """The files of the copy with these suffixes."""
    found = [copy / name for name in git(copy, "ls-files").splitlines()]
    return [path for path in found if path.suffix in (suffixes or (".py",))]


OWN_FOLDERS = ("examples", "scripts", "tests")


def find_missing_scripts(copy: Path) -> list[str]:
    """Imports of scripts and tests, at the top of the copy's files, that the copy has left out."""
    found = []
    for path in own_files(copy):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module in OWN_FOLDERS:
                names = [f"{node.module}/{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module.startswith(
                tuple(f"{folder}." for folder in OWN_FOLDERS)
            ):
                names = [node.module.replace(".", "/")]
            else:
                continue
            missing = [
                n for n in names if not (copy / f"{n}.py").exists() and not (copy / n).is_dir()
            ]
            found += [f"{path.relative_to(copy)} imports {name}" for name in missing]
    return found


def find_undeclared_imports(copy: Path) -> list[str]:
    """Imports at the top of the copy's files that none of its dependencies brings."""
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    brought = find_distributions([*project["dependencies"], *(line for e in extras for line in e)])
    own = {"project", "examples", "samestep", "scripts", "tests", "train"}
    own |= {path.stem for path in (copy / "scripts").glob("*.py")}
    found = []
    for path in own_files(copy):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names:
                if not brought.intersection(find_modules().get(name, ())):
                    found.append(f"{path.relative_to(copy)} imports {name}")
    return found


find_modules = functools.cache(importlib.metadata.packages_distributions)
find_needs = functools.cache(importlib.metadata.requires)


def find_distributions(requirements: list[str]) -> set[str]:
    """The names of the packages that are installed if these are."""
    found, seen = set(), set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            needs = find_needs(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(importlib.metadata.metadata(requirement.name)["Name"])
        extras = ["", *requirement.extras]
        for need in map(Requirement, needs):
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(need)
    return found


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


ORDINARY = """
import os

import lightning as L
import numpy as np
import pandas
import torchvision
from torch import nn, optim


class Net(L.LightningModule):
    def __init__(self, width=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return optim.Adam(self.parameters(), lr=self.hparams.lr)


def load(folder, names=[]):
    if len(names) == 0:
        names = [name for name in os.listdir(folder)]
    table = pandas.read_csv(os.path.join(folder, names[0]))
    return torchvision.ops.nms, dict(values=np.array(table), count=len(names))
""".lstrip()
"""A user's file: no docstrings, no annotations, and a package without types."""


def test_a_copy_is_changed_and_updated(template: Path, tmp_path: Path):
    import copier

    # It gets a second version, which no other test must see.
    template = shutil.copytree(template, tmp_path / "template")
    copy = make_copy(template, tmp_path / "my project", tasks=["images"], clusters=["slurm"])
    assert find_old_names(copy) == []
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    assert project["name"] == "bird-songs"
    assert project["authors"] == [{"name": 'Ada "Countess" Lovelace'}]
    assert 'image.title="bird-songs"' in (copy / "Dockerfile").read_text()
    assert "project: bird-songs # " in (copy / "configs/train.yaml").read_text()
    assert (copy / "README.md").read_text().startswith("# bird-songs\n")

    # The user changes what is theirs.
    net, data = copy / "src/project/nets/cnn.py", copy / "configs/data/digits.yaml"
    replace(copy / "README.md", "# bird-songs\n", "# Songs of birds\n")
    replace(copy / "configs/train.yaml", "seed: 0 #", "seed: 9 #")
    replace(data, "global_batch_size: 32", "global_batch_size: 64")
    replace(copy / "configs/trainer/default.yaml", "max_epochs: 20", "max_epochs: 7")
    net.write_text(net.read_text() + "\n\nMINE = 1\n")
    ordinary = copy / "src/project/ordinary.py"
    ordinary.write_text(ORDINARY)
    replace(copy / "pyproject.toml", 'name = "bird-songs"', 'name = "songs"')
    own, removed = (copy / f"configs/experiment/{name}.yaml" for name in ("mine", "digits_ema"))
    own.write_text("seed: 5\n")
    removed.write_text(removed.read_text() + "seed: 5\n")
    (copy / "configs/trainer/fsdp.yaml").unlink()
    commit(copy)
    mine = net.read_text()

    # A new version of the template. One of its changes is where the user has changed a line.
    errors = template / "library/src/samestep/errors.py"
    errors.write_text(errors.read_text() + "\n\nVERSION = 2\n")
    new = "from project.nets import cnn\n\nprint(cnn)\n"
    (template / "src/project/new.py").write_text(new)
    net_of_template = template / "src/project/nets/cnn.py"
    net_of_template.write_text("# Version 2.\n" + net_of_template.read_text())
    replace(template / "configs/data/digits.yaml", "real data that needs", "real data which needs")
    replace(template / "configs/trainer/default.yaml", "max_epochs: 20", "max_epochs: 30")
    replace(template / "configs/train.yaml", "report: true #", "report: false #")
    with (template / "Makefile").open("a") as file:
        file.write("\n# The second version.\n")
    (template / "configs/experiment/digits_ema.yaml").unlink()
    with (template / "configs/trainer/fsdp.yaml").open("a") as file:
        file.write("# The second version.\n")
    commit(template, "v2.0.0")
    (template / "configs/unreleased.yaml").write_text("seed: 1\n")
    commit(template)
    before = library(copy)
    wheel = (copy / before["path"]).read_bytes()
    tell_address(copy, template)
    copier.run_update(copy, overwrite=True, **TRUST)

    assert library(copy) == before
    assert (copy / before["path"]).read_bytes() != wheel
    assert errors.read_bytes() in (copy / before["path"]).read_bytes()
    assert net.read_text() == "# Version 2.\n" + mine
    assert (copy / "src/project/new.py").read_text() == new
    assert (copy / "README.md").read_text().startswith("# Songs of birds\n")
    assert "The second version" in (copy / "Makefile").read_text()
    assert "global_batch_size: 64" in data.read_text()
    assert "real data which needs" in data.read_text()
    assert 'name = "songs"' in (copy / "pyproject.toml").read_text()
    assert own.read_text() == "seed: 5\n"
    assert not (copy / "configs/trainer/fsdp.yaml").exists(), "the user has deleted it"
    # Git still has what the user wrote into a file that the template has removed.
    assert " D configs/experiment/digits_ema.yaml" in git(copy, "status", "--porcelain")
    values = (copy / "configs/train.yaml").read_text()
    assert "seed: 9 #" in values
    assert "report: false #" in values
    assert not (copy / "configs/unreleased.yaml").exists(), "copies follow tags, not HEAD"
    assert "_commit: v2.0.0" in (copy / ".copier-answers.yml").read_text()
    conflict = (copy / "configs/trainer/default.yaml").read_text()
    assert "<<<<<<< before updating\nmax_epochs: 7" in conflict
    assert "UU configs/trainer/default.yaml" in git(copy, "status", "--porcelain")

    git(copy, "checkout", "--ours", "configs/trainer/default.yaml")
    commit(copy)
    check_style(copy)
    # Without the packages that it imports, which take minutes.
    options = ["--follow-imports=skip", f"--cache-dir={tmp_path / 'mypy'}", str(ordinary)]
    assert "Success" in call(copy, "-m", "mypy", *options)
    call(copy, "train.py", "debug=fast", NO_PICTURES)


ALL_CLUSTERS = ["kubernetes", "operators", "slurm", "docker", "runai", "flyte"]
ALL_TASKS = ["images", "language", "tables", "finetune"]


@pytest.mark.parametrize(
    ("tasks", "clusters", "commands"),
    [
        (
            [],
            [],
            [
                "train.py debug=limit run_id=a",
                "-m samestep evaluate runs/a",
                "-m samestep export runs/a",
            ],
        ),
        (
            ["language"],
            ["kubernetes"],
            [
                "train.py debug=fast model.net.num_layers=1",
                "-m samestep launch --render cluster=k8s",
            ],
        ),
        (
            ["images", "tables"],
            ["runai", "flyte"],
            ["-m samestep launch --render cluster=flyte"],
        ),
    ],
    ids=["skeleton", "language", "runai and flyte"],
)
def test_a_copy_of_a_few_things_works(
    template: Path, tmp_path: Path, tasks: list[str], clusters: list[str], commands: list[str]
):
    copy = make_copy(template, tmp_path / "copy", tasks=tasks, clusters=clusters)
    assert find_old_names(copy) == []
    assert find_undeclared_imports(copy) + find_missing_scripts(copy) == []
    # The package exports nothing: what the page names is the library's.
    assert "`project." not in (copy / "README.md").read_text()
    assert ("SkeletonData" in "".join(path.read_text() for path in own_files(copy))) == (not tasks)
    assert (copy / "examples").exists() == bool({*tasks} - {"images"})
    check_style(copy)
    for command in commands:
        call(copy, *command.split())
    if not tasks:
        tested = run_pytest(copy, "tests")
        assert tested.returncode == 0, tested.stdout + tested.stderr


MAX_FILES, MAX_LINES = 70, 1_800
"""Of a default copy: files beside the lock; lines of Python, YAML and Markdown. One sees it all."""


def test_a_default_copy_is_small_and_passes_its_tests(template: Path, tmp_path: Path):
    copy = make_copy(template, tmp_path / "copy")
    names = git(copy, "ls-files").splitlines()
    assert len(names) - 1 <= MAX_FILES
    counted = own_files(copy, ".py", ".yaml", ".yml", ".md")
    assert sum(len(path.read_text().splitlines()) for path in counted) <= MAX_LINES
    assert len((copy / "AGENTS.md").read_text().splitlines()) <= 60
    assert find_old_names(copy) + find_undeclared_imports(copy) + find_missing_scripts(copy) == []
    clusters = {path.stem for path in (copy / "configs/cluster").iterdir()}
    assert clusters == {"common", "k8s", "kubernetes", "local", "pods"}
    check(copy, "tests")


def test_a_copy_of_all_things_passes_the_tests_of_its_examples(template: Path, tmp_path: Path):
    """It takes samestep from a repository: here the template's own."""
    answers = {"library": "git", "address": template.as_uri(), "clusters": ALL_CLUSTERS}
    copy = make_copy(template, tmp_path / "copy", tasks=ALL_TASKS, **answers)
    assert find_old_names(copy) == []
    assert find_undeclared_imports(copy) + find_missing_scripts(copy) == []
    assert library(copy)["git"] == template.as_uri()
    # All are collected, which imports them. Those that take long are the same as here.
    quick = "test_net or test_text or three_tables or several_kinds or last_layer"
    assert "15 passed" in check(copy, "examples", "-k", quick)
    for cluster in ("swarm", "jobset"):
        call(copy, "-m", "samestep", "launch", "--render", f"cluster={cluster}")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The library as one file."""
    call(ROOT, ".copier/wheel.py", "library", str(tmp_path))
    (path,) = tmp_path.glob("*.whl")
    return path


def test_the_wheel_is_the_library(wheel: Path, tmp_path: Path):
    """What hatchling would make of it, as pip sees it, and the same bytes each time."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
        assert {entry.compress_type for entry in file.infolist()} == {zipfile.ZIP_STORED}
    (found,) = importlib.metadata.distributions(name="samestep", path=[str(tmp_path)])
    installed = importlib.metadata.distribution("samestep")
    # hatchling writes out an extra that another one names.
    needs = {need for need in map(Requirement, found.requires) if need.name != "samestep"}
    assert needs <= {*map(Requirement, installed.requires)}
    names = {Requirement(need).name for need in installed.requires}
    assert {need.name for need in needs} == names
    for name in ("Name", "Version", "License-Expression", "Provides-Extra"):
        assert {*found.metadata.get_all(name)} == {*installed.metadata.get_all(name)}
    specifiers = {SpecifierSet(each.metadata["Requires-Python"]) for each in (found, installed)}
    assert len(specifiers) == 1
    assert {*found.entry_points} == {*installed.entry_points}
    for path in filter(None, git(ROOT, "ls-files", "-z", "library/src").split("\0")):
        place = tmp_path / path.removeprefix("library/src/")
        assert place.read_bytes() == (ROOT / path).read_bytes()
    before = wheel.read_bytes()
    for path in (ROOT / "library/src/samestep").glob("*.py"):
        path.touch()
    call(ROOT, ".copier/wheel.py", "library", str(tmp_path))
    assert wheel.read_bytes() == before


def test_pip_installs_the_wheel(wheel: Path, tmp_path: Path):
    """It looks at each hash of RECORD."""
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    call(tmp_path, "-m", "pip", "install", *options, str(wheel))
    assert (tmp_path / "site/samestep/trainer.py").is_file()
    assert (tmp_path / "site/bin/samestep").is_file()


def library(copy: Path) -> str:
    """Where the copy's samestep comes from."""
    settings = tomllib.loads((copy / "pyproject.toml").read_text())
    (need,) = [line for line in settings["project"]["dependencies"] if "samestep" in line]
    assert need.startswith("samestep[hydra,report,launch,sweep]")
    sources = settings["tool"].get("uv", {}).get("sources", {})
    found = sources.get("samestep") or need.partition("==")[2]
    present = {path.name for path in (copy / "vendor", copy / "library") if path.exists()}
    copied = re.findall("^COPY (vendor|library)", (copy / "Dockerfile").read_text(), re.M)
    assert present == {*copied}
    return found


def test_the_library_may_come_from_elsewhere_later(template: Path, tmp_path: Path):
    import copier

    copy = make_copy(template, tmp_path / "copy", tasks=[], clusters=["kubernetes"])
    version = tomllib.loads((ROOT / "library/pyproject.toml").read_text())["project"]["version"]
    commit_id = git(template, "rev-parse", "HEAD").strip()
    for choice, found in (
        ("wheel", {"path": f"vendor/samestep-{version}-py3-none-any.whl"}),
        ("index", version),
        ("git", {"git": "https://host/us.git", "rev": commit_id, "subdirectory": "library"}),
        ("folder", {"path": "library", "editable": True}),
        ("wheel", {"path": f"vendor/samestep-{version}-py3-none-any.whl"}),
    ):
        data = {"library": choice, "address": "https://host/us.git"}
        tell_address(copy, template)
        copier.run_update(copy, overwrite=True, data=data, **TRUST)
        assert library(copy) == found
        assert git(copy, "ls-files", "--unmerged") == ""
        commit(copy)


def test_no_path_of_this_machine_is_in_a_copy():
    text = (ROOT / ".copier-answers.yml.jinja").read_text()
    options = {"block_start_string": "[%", "block_end_string": "%]", "trim_blocks": True}
    options |= {"variable_start_string": "[=", "variable_end_string": "=]"}
    options |= {"comment_start_string": "[%#", "comment_end_string": "#%]"}
    env = jinja2.Environment(
        **options, extensions=["jinja2_ansible_filters.AnsibleCoreFiltersExtension"]
    )
    for address in (
        "https://host/a.git",
        "git@host:a.git",
        "gh:a/b",
        "git+ssh://host/a",
        "ssh://host/a",
    ):
        answers = {"_commit": "v1.0.0", "_src_path": address, "name": "a"}
        assert f"\n_src_path: {address}\n" in env.from_string(text).render(_copier_answers=answers)
    for path in ("..", "/srv/a", "~/a", "../a:b/c", "file:///srv/a", "git+file:///srv/a"):
        answers = {"_commit": "v1.0.0", "_src_path": path, "name": "a"}
        found = env.from_string(text).render(_copier_answers=answers).splitlines()
        assert found[1:] == ["_commit: v1.0.0", "name: a"]


def test_the_folder_names_the_project(template: Path, tmp_path: Path):
    """Without any answer."""
    import copier

    for folder, name in (("My Birds", "my-birds"), ("2nd_try!", "nd-try"), ("123", "my-project")):
        copier.run_copy(str(template), tmp_path / folder, skip_tasks=True, **TRUST)
        assert f'\nname = "{name}"\n' in (tmp_path / folder / "pyproject.toml").read_text()


def test_pip_installs_the_library_of_a_commit(template: Path, tmp_path: Path):
    """What a copy's pyproject.toml says, in a folder of its own."""
    commit_id = git(template, "rev-parse", "HEAD").strip()
    line = f"samestep @ git+{template.as_uri()}@{commit_id}#subdirectory=library"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    done = run("-m", "pip", "install", *options, line)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/samestep/trainer.py").is_file()


def test_a_reader_of_the_repository_sees_no_statement_of_copier():
    """They stand in .copier; what it includes must not look like one to Jinja."""
    names = git(ROOT, "ls-files", "-co", "--exclude-standard", "--", "*", ":!.copier", ":!tests")
    for name in names.splitlines():
        path = ROOT / name
        if name == "copier.yml" or name.endswith(".jinja") or not path.is_file():
            continue
        content = path.read_bytes()
        # No text, such as a picture, or data in this checkout: any bytes may stand there.
        if b"\0" in content:
            continue
        text = content.decode(errors="replace")
        assert not re.search(r"\[%|%\]|\[= |# copier:|<!-- copier:", text), name
