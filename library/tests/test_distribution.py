"""What is installed from ``library/``, and the script of its README in an empty environment."""

import gzip
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from sklearn.datasets import load_digits

from library.tests.programs import PATIENCE_S, environment, run

pytestmark = pytest.mark.program

LIBRARY = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(LIBRARY / "src").as_posix()
    for path in (LIBRARY / "src" / "samestep").rglob("*")
    if path.is_file() and path.suffix != ".pyc"
}


PROJECT = tomllib.loads((LIBRARY / "pyproject.toml").read_text())["project"]
HOST = "https://host/us"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that is built from it, as for an index."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), "--target"]
    known = os.environ | {"DOCS_REPOSITORY": HOST}
    subprocess.run([*build, "sdist"], cwd=LIBRARY, check=True, capture_output=True, env=known)
    with tarfile.open(only(folder, "*.tar.gz")) as sdist:
        sdist.extractall(folder / "sdist", filter="data")
    root = only(folder / "sdist", "samestep-*")
    assert not (root / "tests").exists()
    subprocess.run([*build, "wheel"], cwd=root, check=True, capture_output=True, env=known)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return only(built, "*.whl")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """What the wheel says of itself; its README is the payload."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(file.read(name))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    assert names == SOURCES
    assert "samestep/py.typed" in names


def test_tools_for_uploading_accept_what_is_built(built: Path):
    pytest.importorskip("twine", reason="make test installs it")
    for tool in ("twine", "check", "--strict"), ("check_wheel_contents",):
        files = [str(only(built, "*.whl"))]
        if tool[0] == "twine":
            files.append(str(only(built, "*.tar.gz")))
        done = subprocess.run(
            [sys.executable, "-m", *tool, *files], cwd=built, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_one_version_is_said_everywhere(metadata: Message):
    """docs/install.md has it too: tests/test_docs.py."""
    version = PROJECT["version"]
    assert metadata["Version"] == version
    # The action that uploads knows no later one.
    assert metadata["Metadata-Version"] == "2.4"
    first, *_ = re.findall(r"^## (.*)$", (LIBRARY / "CHANGELOG.md").read_text(), re.M)
    assert re.fullmatch(rf"{re.escape(version)} \((unreleased|20\d\d-\d\d-\d\d)\)", first)


def test_the_versions_of_python_are_those_of_the_classifiers(metadata: Message):
    allowed = SpecifierSet(metadata["Requires-Python"])
    versions = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in allowed]
    found = re.findall(r"Python :: (3\.\d+)$", "\n".join(metadata.get_all("Classifier")), re.M)
    assert found == versions
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_an_index_can_show_the_readme(metadata: Message):
    """Its links lead to the files of the version in the repository."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", text)
    tagged = f"{HOST}/blob/v{PROJECT['version']}"
    assert f"{tagged}/docs/contract.md" in links
    for link in links:
        assert link.startswith("https://"), link
        if link.startswith(f"{tagged}/"):
            path, _, _ = link.removeprefix(f"{tagged}/").partition("#")
            assert (LIBRARY.parent / path).is_file(), link
    assert f"Changelog, {tagged}/library/CHANGELOG.md" in metadata.get_all("Project-URL")


def test_what_is_needed_is_little_and_each_extra_says_more(metadata: Message):
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    core = {requirement.name for requirement in needed if not requirement.marker}
    assert core == {
        "fsspec", "lightning", "numpy", "pyyaml", "rich", "torch", "torchmetrics"
    }  # fmt: skip
    extras = {*metadata.get_all("Provides-Extra")}
    assert extras >= {"hydra", "report", "launch", "sweep", "s3", "wandb", "mlflow", "all"}

    def brought_by(extra: str) -> set[str]:
        return {n.name for n in needed if n.marker and n.marker.evaluate({"extra": extra})}

    assert brought_by("all") == {name for extra in extras for name in brought_by(extra)}


def distributions(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """These distributions and what they need, each with the extras that are asked for."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        found[name] = importlib.metadata.distribution(name)
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            for need in map(Requirement, found[name].requires or []):
                if not need.marker or need.marker.evaluate({"extra": extra}):
                    todo.append(need)
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, Lightning, and what the scripts of the README need.

    The packages are links to those of this environment: to install them anew takes minutes.
    """
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder)
    python = folder / "bin/python"
    site = only(folder, "lib/python3*/site-packages")
    of_scripts = "torchvision", "jsonargparse", "docstring-parser", "typeshed-client"
    for distribution in distributions("lightning", "rich", *of_scripts).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            source = Path(str(distribution.locate_file(top)))
            if not (site / top).exists() and source.exists():
                (site / top).symlink_to(source)
    before = {path.name for path in site.iterdir()}
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    # Without an index: everything that the Trainer needs came with Lightning, but rich.
    install = [*pip, "install", "--quiet", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    subprocess.run([*pip, "check"], check=True, capture_output=True)
    names = {path.name for path in site.iterdir()}
    assert {name.partition("-")[0] for name in names - before} == {"samestep"}
    assert not {"hydra", "omegaconf", "scipy", "matplotlib", "optuna"} & names
    return python


def test_the_command_tells_its_version(python: Path):
    program = [python.with_name("samestep"), "--version"]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"samestep {PROJECT['version']}\n"


def write_mnist(folder: Path) -> None:
    """Handwritten digits, in the files that torchvision would download."""
    folder.mkdir(parents=True)
    digits = load_digits()
    images = np.kron(digits.images * 15, np.ones((3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    for name, part in (("train", slice(0, 1440)), ("t10k", slice(1440, None))):
        for kind, values in (("images-idx3", images[part]), ("labels-idx1", digits.target[part])):
            header = b"\0\0\x08" + bytes([values.ndim])
            header += b"".join(size.to_bytes(4, "big") for size in values.shape)
            content = header + values.astype(np.uint8).tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(content)
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


README = (LIBRARY / "README.md").read_text()
SCRIPT, CLI, *_ = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
STEP = "    def training_step(self, batch, batch_idx):\n"
DIES = """\
        import os  # planted by the test
        if f"{self.global_step} {self.global_rank}" == os.environ.get("DIES_AT"):
            os.kill(os.getpid(), int(os.environ["BY"]))
"""


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of the README."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_mnist(folder / "data/MNIST/raw")
    assert STEP in SCRIPT
    shorter = SCRIPT.replace("max_epochs=3", "max_epochs=2")
    assert shorter != SCRIPT
    (folder / "mnist.py").write_text(shorter.replace(STEP, STEP + DIES))
    (folder / "cli.py").write_text(CLI)
    return folder


def test_the_tutorial_continues_exactly(tutorial: Path):
    """Killed and continued on one rank. More of both: test_trainer.py."""
    run_dir = tutorial / "runs/mnist"
    at_step = {"DIES_AT": "30 0", "BY": str(int(signal.SIGKILL))}
    found = []
    for variables, code in (({}, 0), (at_step, -signal.SIGKILL), ({}, 0)):
        done = run("mnist.py", cwd=tutorial, **variables)
        assert done.returncode == code, done.stderr
        assert (run_dir / "metrics.json").exists() == (code == 0)
        found.append(torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
        if len(found) == 1:
            shutil.rmtree(run_dir)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)


def test_a_script_runs_in_an_empty_environment(python: Path, tutorial: Path):
    """That of LightningCLI, which imports the other one; it is stopped."""
    run_dir = tutorial / "runs/cli"
    kept = {"HOME": str(tutorial), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}

    def start(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command], cwd=tutorial, capture_output=True, text=True,
            env=kept | variables, check=False, timeout=PATIENCE_S,
        )  # fmt: skip

    done = start(python.with_name("samestep"), "run", "--help")
    assert done.returncode == 0, done.stderr
    assert "samestep run --nproc-per-node=2 script.py" in done.stdout
    # Without an agent, which would import torch once more: test_trainer.py has it.
    command = [python, "cli.py", "fit", "--trainer.devices=1", f"--trainer.run_dir={run_dir}"]
    done = start(*command, DIES_AT="11 0", BY=str(int(signal.SIGTERM)))
    assert done.returncode == 143, done.stderr
    last = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 12
    assert (run_dir / "logs/rank-0.log").is_file()
