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
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from sklearn.datasets import load_digits

from library.tests.programs import PATIENCE_S, run

LIBRARY = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(LIBRARY / "src").as_posix()
    for path in (LIBRARY / "src" / "samestep").rglob("*")
    if path.is_file() and path.suffix != ".pyc"
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), "--target"]
    subprocess.run([*build, "sdist"], cwd=LIBRARY, check=True, capture_output=True)
    with tarfile.open(only(folder, "*.tar.gz")) as sdist:
        sdist.extractall(folder / "sdist", filter="data")
    root = only(folder / "sdist", "samestep-*")
    assert not (root / "tests").exists()
    subprocess.run([*build, "wheel"], cwd=root, check=True, capture_output=True)
    return only(folder, "*.whl")


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        assert names == SOURCES
        assert "samestep/py.typed" in names
        (metadata,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        text = file.read(metadata).decode()
    needed = [Requirement(line) for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M)]
    core = {requirement.name for requirement in needed if not requirement.marker}
    assert core == {
        "fsspec", "lightning", "numpy", "pyyaml", "rich", "torch", "torchmetrics"
    }  # fmt: skip
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.M))
    assert extras >= {"hydra", "report", "launch", "sweep", "s3", "wandb", "mlflow", "all"}

    def brought_by(extra: str) -> set[str]:
        return {n.name for n in needed if n.marker and n.marker.evaluate({"extra": extra})}

    assert brought_by("all") == {name for extra in extras for name in brought_by(extra)}


def distributions(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """These distributions and what they need, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        needs = map(Requirement, found[name].requires or [])
        todo += [n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})]
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
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    of_scripts = "torchvision", "jsonargparse", "docstring-parser", "typeshed-client"
    for distribution in distributions("lightning", "rich", "fsspec", *of_scripts).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            source = Path(str(distribution.locate_file(top)))
            if not (site / top).exists() and source.exists():
                (site / top).symlink_to(source)
    subprocess.run([*pip, "check"], check=True, capture_output=True)
    names = {path.name for path in site.iterdir()}
    assert not {"hydra", "omegaconf", "scipy", "matplotlib", "optuna"} & names
    return python


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
SCRIPT, CLI = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
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
