"""``samestep image``: the commands that it executes, and a small image that buildah builds."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.launch.check.images import is_pinned
from tests.conftest import ROOT, run

NAME = "ghcr.io/me/project"
STAND_IN = """#!{python}
import json, os, sys
call = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
print(json.dumps(call), file=open({told!r}, "a"))
print("output of the builder")
sys.exit(call[:2] in {failing})
"""


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def expected_tag() -> str:
    """As the script's text promises; a file that is not in git counts too, as it gets in."""
    return git("rev-parse", "HEAD")[:12] + "-dirty" * bool(git("status", "--porcelain"))


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Makes stand-ins for programs; nothing but git is beside them on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "git").symlink_to(shutil.which("git"))

    def make(*names: str, failing: tuple[list[str], ...] = ()) -> dict[str, str]:
        text = STAND_IN.format(
            python=sys.executable, told=str(tmp_path / "told"), failing=list(failing)
        )
        for name in names:
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        return {"PATH": str(folder)}

    return make


def told(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]


@pytest.mark.parametrize(
    ("there", "failing", "begins"),
    [
        (["docker", "podman", "buildah"], [], ["docker", "build"]),
        (["docker", "podman", "buildah"], [["docker", "info"]], ["podman", "build"]),
        (["buildah"], [], ["buildah", "bud", "--layers"]),
    ],
)
def test_the_first_builder_that_works_builds_and_pushes(there, failing, begins, programs, tmp_path):
    path = programs(*there, failing=tuple(failing))
    extra = ["--", "--secret", "id=pip.conf,src=pip.conf"]
    done = run("-m", "samestep", "image", NAME, "--push", *extra, **path)
    image = f"{NAME}:{expected_tag()}"
    # Only the name is on stdout: IMAGE=$(samestep image ...) takes it.
    assert (done.returncode, done.stdout) == (0, f"{image}\n")
    assert "output of the builder" in done.stderr
    build, push = [call for call in told(tmp_path) if call[1] != "info"]
    assert build[: len(begins)] == begins
    revision = git("rev-parse", "HEAD") + "-dirty" * image.endswith("-dirty")
    assert f"--build-arg=REVISION={revision}" in build
    assert build[-4:] == [f"--tag={image}", *extra[1:], str(ROOT)]
    assert push == [begins[0], "push", image]
    assert is_pinned(image)


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
@pytest.mark.parametrize(
    ("cluster", "loads"),
    [
        ("kind", ["kind", "load", "image-archive"]),
        ("minikube", ["minikube", "image", "load"]),
        ("containerd", ["ctr", "--namespace=k8s.io", "images", "import"]),
    ],
)
def test_an_image_is_loaded_as_an_archive(builder, cluster, loads, programs, tmp_path):
    done = run("-m", "samestep", "image", NAME, f"--load={cluster}", **programs(builder, loads[0]))
    assert done.returncode == 0, done.stderr
    _, save, load = [call for call in told(tmp_path) if call[1] != "info"]
    archive = load[-1]
    assert load == [*loads, archive]
    assert any(archive in word for word in save)
    assert not Path(archive).parent.exists()  # nothing of 6 GB stays


@pytest.mark.parametrize(
    ("words", "there", "code", "message"),
    [
        (["project"], [], 2, "project: must begin with a registry, such as ghcr.io/me/project"),
        (["me/project"], [], 2, "me/project: must begin with a registry"),
        ([f"{NAME}:1"], [], 2, f"{NAME}:1: must be lower case and without a tag"),
        (["ghcr.io/Me/project"], [], 2, "must be lower case"),
        ([NAME], [], 1, "no builder of images works here: tried docker, podman, buildah"),
        ([NAME, "--builder=podman"], ["docker"], 1, "tried podman;"),
        ([NAME, "--load=kind"], ["buildah"], 1, "kind: no such command; --load=kind needs it"),
    ],
)
def test_what_cannot_be_built_is_one_message(words, there, code, message, programs):
    done = run("-m", "samestep", "image", *words, **programs(*there))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failed_build_is_an_error(programs):
    done = run(
        "-m", "samestep", "image", NAME, **programs("podman", failing=(["podman", "build"],))
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("error: podman build: failed with exit code 1\n")


@pytest.mark.skipif(
    not shutil.which("buildah") or os.geteuid() != 0, reason="needs buildah, as root"
)
def test_buildah_really_builds_and_the_archive_has_the_name(programs, tmp_path):
    recipe = tmp_path / "Dockerfile"
    recipe.write_text("FROM scratch\nARG REVISION\nLABEL revision=${REVISION}\nCOPY LICENSE /\n")
    path = programs()["PATH"]
    kept = Path(path, "ctr")
    kept.write_text(f'#!/bin/sh\nfor last; do :; done\ncp "$last" {tmp_path}/loaded.tar\n')
    kept.chmod(0o755)
    done = run(
        "-m", "samestep", "image", "localhost/project-test",
        "--builder=buildah", "--load=containerd", "--", f"--file={recipe}", "--isolation=chroot",
        PATH=f"{path}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    image = done.stdout.strip()
    subprocess.run(["buildah", "rmi", image], capture_output=True, check=True)
    with tarfile.open(tmp_path / "loaded.tar") as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(manifest["Config"]))
    assert manifest["RepoTags"] == [image]
    assert config["config"]["Labels"]["revision"].startswith(git("rev-parse", "HEAD"))
