"""Build the image of this working tree, and publish it or load it into a cluster on this machine.

samestep image ghcr.io/me/project --push
samestep image localhost/project --load kind
samestep image ghcr.io/me/project -- --secret id=pip.conf,src=pip.conf

The tag is the commit, with -dirty if the working tree differs from it. Only the full name of the
image is printed on stdout, for cluster.image=. Arguments after -- are those of the builder.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from samestep.command_line import Parser
from samestep.errors import ConfigError, RunError
from samestep.hydra.folder import project_folder
from samestep.ranks import environment

BUILDERS = {  # how each begins a build
    "docker": ["docker", "build"],
    "podman": ["podman", "build"],
    "buildah": ["buildah", "bud", "--layers"],
}
LOADERS = {  # how each takes images from an archive, whose path comes last
    "kind": ["kind", "load", "image-archive"],
    "minikube": ["minikube", "image", "load"],
    "containerd": ["ctr", "--namespace=k8s.io", "images", "import"],
}


def main(argv: Sequence[str]) -> int:
    """Build, then push or load, and print the name."""
    parser = Parser("samestep image", __doc__)
    parser.add_argument("name", metavar="NAME", help="without a tag, such as ghcr.io/me/project")
    parser.add_argument("--push", action="store_true", help="push it to its registry")
    parser.add_argument("--load", choices=LOADERS, help="load it into the cluster of this machine")
    parser.add_argument("--builder", choices=BUILDERS, help="default: the first one that works")
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse(argv[:end])
    check_name(options.name)
    builder = find_builder([options.builder] if options.builder else list(BUILDERS))
    commit, dirty = describe_commit()
    name = f"{options.name}:{commit[:12]}{dirty}"
    build(builder, name, commit + dirty, list(argv[end + 1 :]))
    if options.push:
        execute([builder, "push", name])
    if options.load:
        load(builder, name, options.load)
    print(name)
    return 0


def check_name(name: str) -> None:
    """Refuse a name without a registry: each builder and cluster would add another one."""
    registry, _, rest = name.partition("/")
    if not rest or not re.search(r"[.:]|^localhost$", registry):
        raise ConfigError(
            f"{name}: must begin with a registry, such as ghcr.io/me/project; "
            "localhost/project is for an image that is only loaded"
        )
    if re.search(r"[@:]", rest) or name != name.lower():
        raise ConfigError(f"{name}: must be lower case and without a tag; the tag is the commit")


def find_builder(names: list[str]) -> str:
    """The first of these programs that can build here.

    Raises:
        RunError: if none can.
    """
    for name in names:
        # Docker's client may be there without its daemon.
        if shutil.which(name) and (name != "docker" or docker_answers()):
            return name
    raise RunError(
        f"no builder of images works here: tried {', '.join(names)}; install podman or buildah, "
        "or start Docker's daemon"
    )


def docker_answers() -> bool:
    """Whether Docker's client reaches its daemon."""
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def describe_commit() -> tuple[str, str]:
    """The commit, and ``-dirty`` if files differ from it or are not in git; otherwise nothing."""
    commit = ask_git("rev-parse", "HEAD")
    return commit, "-dirty" if ask_git("status", "--porcelain") else ""


def ask_git(*words: str) -> str:
    """What git prints."""
    done = subprocess.run(
        ["git", *words], cwd=project_folder(), capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise RunError(f"git cannot name the commit, which becomes the tag: {done.stderr.strip()}")
    return done.stdout.strip()


def build(builder: str, image: str, revision: str, arguments: list[str]) -> None:
    """Build the image from the Dockerfile."""
    environment.set_variable("DOCKER_BUILDKIT", "1")  # Docker before 23 needs it for secrets
    words = [
        f"--build-arg=REVISION={revision}",
        f"--tag={image}",
        *arguments,
        str(project_folder()),
    ]
    execute([*BUILDERS[builder], *words])


def load(builder: str, image: str, cluster: str) -> None:
    """Hand the image to a cluster on this machine, as an archive, which all of them take."""
    if not shutil.which(LOADERS[cluster][0]):
        raise RunError(f"{LOADERS[cluster][0]}: no such command; --load={cluster} needs it")
    with tempfile.TemporaryDirectory() as folder:
        archive = f"{folder}/image.tar"
        save = {
            "docker": ["docker", "save", f"--output={archive}", image],
            "podman": ["podman", "save", "--format=docker-archive", f"--output={archive}", image],
            "buildah": ["buildah", "push", image, f"docker-archive:{archive}:{image}"],
        }
        execute(save[builder])
        execute([*LOADERS[cluster], archive])


def execute(command: list[str]) -> None:
    """Run a command; what it prints goes to stderr.

    Raises:
        RunError: if it fails.
    """
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command[:2])}: failed with exit code {done.returncode}")
