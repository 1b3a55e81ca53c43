"""What goes into the image. ``IMAGE_TEST=1`` builds it, and trains in it.

The other tests keep promises that an image which was built once does not show: what is sent to the
builder from a working tree with private files, and where packages come from.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
builds = pytest.mark.skipif(
    os.environ.get("IMAGE_TEST") != "1",
    reason="IMAGE_TEST=1 builds the image, 7 GB, as root",
)


def instructions() -> list[tuple[str, str]]:
    """Name and text of each instruction of the Dockerfile, without comments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined if line)]


def all_of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def settings(name: str) -> dict[str, str]:
    """The values of all ARG or ENV instructions."""
    words = shlex.split(" ".join(all_of(name)))
    return dict(word.split("=", 1) for word in words)


def is_sent(path: Path, root: Path) -> bool:
    """Whether .dockerignore lets a file into the build: the last rule that fits decides."""
    sent, parts = True, path.relative_to(root).parts
    above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for line in IGNORED:
        pattern = line.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        if pattern != anywhere:
            fits = any(fnmatch(part, anywhere) for part in parts)
        else:
            depth = pattern.count("/")
            fits = any(fnmatch(name, pattern) for name in above if name.count("/") == depth)
        sent = line.startswith("!") if fits else sent
    return sent


def context(root: Path) -> Iterator[str]:
    """The files of a folder that are sent to the builder."""
    for path in root.rglob("*"):
        if path.is_file() and is_sent(path, root):
            yield path.relative_to(root).as_posix()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What git tracks or would track, with the private files that lie about in a working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for name in PRIVATE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("private")
    return tmp_path


PRIVATE = (
    ".env", ".env.local", "secrets.yaml", "id_rsa", "src/.env", "src/project/.netrc",
    "configs/local/default.yaml", "data/mnist/train.bin", "runs/mine/checkpoints/last.ckpt",
    ".git/config", ".venv/bin/python", "src/project/__pycache__/run.pyc", "dist/a.whl",
    "src/project.egg-info/PKG-INFO",
)  # fmt: skip
FOLDERS = ("src", "library", "configs", "examples", "k8s", "scripts")
FILES = ("train.py", "requirements.lock", "pyproject.toml", "LICENSE")


def test_the_context_is_the_code_and_nothing_private(checkout: Path):
    sent = set(context(checkout))
    assert sent.isdisjoint(PRIVATE)
    assert {name.split("/")[0] for name in sent} == {*FOLDERS, *FILES}
    code = [path for folder in FOLDERS for path in (checkout / folder).rglob("*")]
    names = {path.relative_to(checkout).as_posix() for path in code if path.is_file()}
    tests = {name for name in names if re.match(r"(library|examples/\w+)/tests/", name)}
    assert names - sent == names & set(PRIVATE) | tests
    assert sum((checkout / name).stat().st_size for name in sent) < 2_500_000


def test_a_change_of_the_code_installs_no_package_again():
    """All come from scripts/packages.sh, which insists on their hashes."""
    names = [f"{name} {rest}" for name, rest in instructions()]
    assert [line for line in names if re.search(r"\b(pip|uv) install", line)] == []
    (installs,) = [index for index, line in enumerate(names) if "packages.sh sync" in line]
    copies = names.index("COPY . ./")
    assert installs < copies
    # The number of the commit is in a later layer, so that another commit keeps the packages.
    assert min(index for index, line in enumerate(names) if "REVISION" in line) > copies


def test_the_image_holds_no_secret_and_no_address():
    assert [rest for _, rest in instructions() if "://" in rest] == []
    assert [name for name in settings("ENV") | settings("ARG") if SECRET.search(name)] == []
    for line in all_of("RUN"):
        if "packages.sh" in line:
            assert line.startswith("--mount=type=secret,id=pip.conf ")
    assert settings("ARG")["PIP_NO_CACHE_DIR"] == "1"


@builds
def test_the_builder_is_sent_what_is_said_here(checkout: Path, tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "Dockerfile"
    recipe.write_text("FROM scratch\nCOPY . /context/\n")
    expected = sorted(context(checkout))
    script = """
        image=$(buildah bud --quiet --isolation chroot --file "$1" .)
        container=$(buildah from "$image")
        (cd "$(buildah mount "$container")/context" && find . -type f -printf '%P\\n')
        buildah rm "$container" > "$1.log"; buildah rmi "$image" >> "$1.log"
    """
    done = subprocess.run(
        ["sh", "-euc", script, "sh", str(recipe)], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == expected


def build_and_train(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What tests/image_build.sh says, which must succeed."""
    arguments = (*shlex.split(os.environ.get("BUILD_ARGS", "")), *arguments)
    done = subprocess.run(
        ["sh", str(ROOT / "tests/image_build.sh"), *arguments],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@builds
def test_the_image_of_flyte_runs_its_workflow():
    page = (ROOT / "docs/clusters/flyte.md").read_text()
    extras = re.search(r'--build-arg EXTRAS="(.*)"', page)[1]
    done = build_and_train(f"--build-arg=EXTRAS={extras}", IMAGE="localhost/project:flyte-test")
    assert "Result(epoch_accuracies=[0." in re.sub(r"\s+", " ", done.stdout)


@builds
def test_the_image_trains_for_a_nameless_user_on_a_read_only_root():
    done = build_and_train()
    for name in ("one", "two"):
        assert re.search(rf"^{name}: 12345:54321 wrote .*\"test/accuracy\": 0\.", done.stdout, re.M)
    assert re.search(r"^revision: [0-9a-f]{40}(-dirty)?$", done.stdout, re.M)
    assert "Warning" not in done.stdout + done.stderr
