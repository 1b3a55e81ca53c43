"""Start trials quickly: fork them from a process that has already imported the libraries.

Most of a short trial's processor time goes into ``import torch`` and ``import lightning``. A fork
has them, and shares their memory; it imports the project's own code itself, so that it runs what
``python train.py`` would run. The server imports, starts no thread, and computes nothing.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from samestep.ranks import environment

ALSO = ("samestep.ending", "samestep.hydra.main", "samestep.report.page", "samestep.run.nodes")
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Forked:
    """A process that was forked for this one: the part of ``subprocess.Popen`` that is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """The exit code, minus the signal if one has ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        """Wait for its end."""
        return self.poll(0)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Forks:
    """The server, which ends with this process. Its forks do not.

    Args:
        modules: what it imports, as far as that is possible.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        assert server.stdin
        with server.stdin as stdin:
            stdin.write("\n".join(modules).encode())
        self.server = server

    def start(
        self, argv: Sequence[str], variables: Mapping[str, str], output: IO[bytes]
    ) -> Forked | None:
        """Run a script with its arguments; its output goes to ``output``. None: nothing can fork.

        The server forks twice, and the process between ends. That makes the fork an orphan, which
        goes to its nearest ancestor that is a "subreaper": this process, for this moment.
        """
        request = os.memfd_create("request")
        os.write(request, json.dumps([list(argv), dict(variables)]).encode())
        prctl = ctypes.CDLL(None).prctl
        try:
            if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:  # some sandboxes lack it
                return None
            socket.send_fds(self.connection, [b"fork"], [request, output.fileno()])
            reply = self.connection.recv(64)
        except OSError:
            reply = b""
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            os.close(request)
        return Forked(int(reply)) if reply else None


def loaded_libraries() -> list[str]:
    """The libraries that this process has imported: a trial needs most of them too.

    Not the project's own code, which may change between two trials, and not Optuna.
    """
    found = []
    for name, module in sys.modules.items():
        package, path = name.partition(".")[0], str(getattr(module, "__file__", ""))
        is_installed = "site-packages" in path or "dist-packages" in path
        if is_installed or package == "samestep" or package in sys.stdlib_module_names:
            found.append(name)
    return [*(name for name in found if not name.startswith(("optuna", "__main__"))), *ALSO]


class _End:
    """The exit code of a fork, which ends without taking apart what it shares with the others."""

    code = 1  # also after an exception

    @classmethod
    def leave(cls) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(cls.code)


def main() -> None:
    """Import the libraries; then fork for each request, and run its script in the fork."""
    atexit.register(_End.leave)  # before all others, so it runs after them
    connection = socket.socket(fileno=int(sys.argv[1]))
    before = environment.variables()
    for name in sys.stdin.read().split():
        with suppress(Exception):
            importlib.import_module(name)
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    # OpenBLAS has ended its threads for that. A fork would lack what others have started.
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return
    own = environment.variables().items() - before.items()  # such as KMP_INIT_AT_FORK
    gc.collect()
    gc.freeze()  # nobody writes to these pages, so they stay shared
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 64, 2)
        if not message:  # the search has ended
            break
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            run(descriptors[0], descriptors[1], connection, dict(own))
            break
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def run(request: int, output: int, connection: socket.socket, own: Mapping[str, str]) -> None:
    """Be the process that was asked for."""
    argv, variables = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    os.setsid()
    connection.send(str(os.getpid()).encode())
    connection.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(request)
    environment.replace({**own, **variables})
    sys.argv[:] = sys.orig_argv[1:] = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    try:
        runpy.run_path(argv[0], run_name="__main__")
        _End.code = 0
    except SystemExit as error:
        _End.code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        raise


if __name__ == "__main__":
    main()
