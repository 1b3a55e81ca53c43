"""A real Docker with a swarm of one node on this machine, made of processes of the tests."""

import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from library.tests.programs import until
from tests.conftest import environment

IMAGE = "ours:1"
LOOP = "trap 'exit 143' TERM; while :; do sleep 1; done"


def missing() -> str:
    """What this machine lacks for it."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    names = [name for name in ("docker", "dockerd") if not shutil.which(name, path=path)]
    if os.geteuid() != 0:
        names.append("the rights of root")
    return " ".join(names)


@contextmanager
def swarm(folder: Path) -> Iterator[dict[str, str]]:
    """A swarm whose only node is this machine, with an image that waits for SIGTERM.

    The rules of the machine's firewall stay as they are.

    Yields:
        The variables by which docker finds it.
    """
    variables = {"DOCKER_HOST": f"unix://{folder}/docker.sock"}
    env = environment(**variables)
    env["PATH"] += ":/usr/sbin"
    places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
    command = [
        "dockerd", f"--host={variables['DOCKER_HOST']}", "--bridge=none", "--iptables=false",
        "--ip6tables=false", "--shutdown-timeout=1",
        *(f"--{key}={folder / name}" for key, name in places.items()),
    ]  # fmt: skip

    def call(*words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["docker", *words], env=env, capture_output=True, **options)

    log = folder / "log"
    with log.open("wb") as file:
        daemon = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        until(
            lambda: daemon.poll() is not None or not call("version").returncode,
            says=lambda: log.read_text()[-2000:],
        )
        assert daemon.poll() is None, log.read_text()[-2000:]
        call("swarm", "init", "--advertise-addr=127.0.0.1", check=True)
        call(
            "node", "update", "--label-add=project=0", call_for(env, "node", "ls", "-q"), check=True
        )
        entrypoint = f'ENTRYPOINT ["/bin/sh", "-c", "{LOOP}"]'
        call("import", f"--change={entrypoint}", "-", IMAGE, input=pack_shell(), check=True)
        yield variables
    finally:
        if daemon.poll() is None:
            call("swarm", "leave", "--force")
            call("network", "rm", "docker_gwbridge")
        daemon.terminate()
        daemon.wait()
        # Of networks whose containers had not ended, which would keep the folder.
        for network in (folder / "exec/netns").glob("*"):
            subprocess.run(["umount", str(network)], capture_output=True, check=False)


def call_for(env: dict[str, str], *words: str) -> str:
    """What a command of docker prints."""
    done = subprocess.run(["docker", *words], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def pack_shell() -> bytes:
    """The files of an image with a shell and ``sleep``: those of this machine."""
    files = {"/bin/sh", "/bin/sleep"}
    said = subprocess.run(["ldd", *files], capture_output=True, text=True, check=True).stdout
    files.update(re.findall(r"(/\S+) \(0x", said))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for file in sorted(files):
            archive.add(file)
    return packed.getvalue()
