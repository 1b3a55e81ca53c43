"""Start Python programs quickly: fork a process that has already imported the libraries.

``import lightning`` costs five seconds of processor time, and the tests start several hundred
Python programs. The *fork server* is an interpreter that has imported the libraries and done
nothing else. ``install()`` makes ``subprocess.Popen`` use it:

1. ``Program.from_call`` decides whether a fork can run the command. If not, Popen runs it.
2. ``ForkServer.fork`` sends the program and its standard streams to the server.
3. ``serve``, in the server, forks. The new process becomes a child of the caller.
4. ``become``, ``run`` and ``execute``, in the new process, prepare it, run the code, and end it.
   Where the code calls ``os.execv``, ``replace`` does the same for another program.

The program has the process id, parent, exit code, signals, process group, folder, variables and
streams that it would have in a new interpreter, and imports the code of this repository by itself.
Its process ends without the parts of Python's end that only free memory. It shares the seed of
Python's hashes with the other programs.

``SAMESTEP_TESTS_FRESH=1`` switches the server off.
"""

import atexit
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

# None of them may start a thread or keep a variable that differs from program to program, as
# kubernetes does with KUBECONFIG.
LIBRARIES = (
    "hydra", "jinja2", "lightning", "optuna", "sklearn.datasets", "torch.distributed.run",
    "torch.utils.tensorboard", "torchvision.datasets", "torchvision.transforms.v2",
)  # fmt: skip

# What a fork runs with ``python -m``. Other modules, such as pip, need none of the libraries.
MODULES = (
    "cProfile", "examples.language.convert", "examples.tables.convert", "labs.bench.contender",
    "library.tests.small", "samestep", "samestep.launch.entrypoint", "torch.distributed.run",
)  # fmt: skip

# Makes its process the first one of a pod, and then runs a command.
ENTER_POD = str(Path(__file__).parents[1] / "library/tests/enter_pod.py")

# Variables that Python or a library reads when it starts. PYTHONPATH is not one of them, because
# ``execute`` sets ``sys.path``; nor is MPLBACKEND, which train.py sets to matplotlib's own choice.
READ_AT_IMPORT = re.compile(
    "PYTHON(?!PATH$)|LD_|LC_|LANG|MKL_|GOMP_|MPL(?!BACKEND$)|CUDA|HOME$|TZ$|TORCH_(LOGS|COMPILE)"
    "|OMP_(?!WAIT_POLICY)"
)

# The options of ``Popen`` that a fork understands.
OPTIONS = {
    "bufsize", "cwd", "encoding", "env", "errors", "start_new_session", "stderr", "stdin",
    "stdout", "text", "universal_newlines",
}  # fmt: skip

PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)
ORIGINAL_POPEN = subprocess.Popen
ORIGINAL_EXECV = os.execv
OWN_CODE = re.compile(r"(samestep|project|library|labs|examples|tests)(\.|$)")


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a program must have in common with the server."""
    return {name: value for name, value in env.items() if READ_AT_IMPORT.match(name)}


@dataclass
class Program:
    """A command line that a fork can run, and what ``Popen`` was told about it."""

    pod: list[str]  # the pod that it is process 1 of, as ENTER_POD names it; empty for none
    argv: list[str]  # after the interpreter and -u
    unbuffered: bool
    cwd: str
    env: dict[str, str]
    new_session: bool
    parent: int

    @classmethod
    def from_call(cls, args: Any, options: Mapping[str, Any]) -> "Program | None":
        """The program that ``Popen`` is called for; None if it needs a new interpreter."""
        if isinstance(args, str | bytes) or not options.keys() <= OPTIONS:
            return None
        python, *argv = map(os.fspath, args)
        pod: list[str] = []
        if python == sys.executable and argv[:1] == [ENTER_POD]:
            pod, (python, *argv) = argv[1:4], argv[4:]
        unbuffered = argv[:1] == ["-u"]
        if unbuffered:
            del argv[0]
        cwd = str(Path(options.get("cwd") or ".").absolute())
        is_module = argv[:1] == ["-m"] and argv[1] in MODULES
        is_script = bool(argv) and argv[0].endswith(".py") and Path(cwd, argv[0]).is_file()
        if python != sys.executable or not (is_module or is_script):
            return None
        env = options.get("env")
        env = dict(os.environ if env is None else env)
        new_session = options.get("start_new_session", False)
        return cls(pod, argv, unbuffered, cwd, env, new_session, os.getpid())


class ForkServer:
    """The caller's side of a process that forks programs for it.

    Args:
        env: the variables of the server.
        connection: a socket to the server, which ends when the socket is closed. Without one, the
            first program starts the server.
    """

    def __init__(self, env: Mapping[str, str], connection: socket.socket | None = None) -> None:
        self.env = env
        self.connection = connection
        self.owner = os.getpid()
        self.lock = threading.Lock()

    def start(self) -> socket.socket:
        """Start the server in a new interpreter."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in self.env.items() if name != "PYTHONPATH"}
        # In a process group of its own: a Ctrl-C is not for the server.
        self.process = ORIGINAL_POPEN(
            [sys.executable, __file__], stdin=theirs, stdout=2, env=env, process_group=0
        )
        theirs.close()
        return ours

    def accepts(self, program: Program) -> bool:
        """Whether a fork is the same as a new interpreter for this program."""
        # A process that the owner has forked is no ancestor of the server.
        is_owner = program.parent == self.owner
        return is_owner and read_at_import(program.env) == read_at_import(self.env)

    def fork(self, program: Program, stdio: Sequence[int]) -> int:
        """Start a program with these descriptors as its standard streams; return its process id.

        The server forks twice, and the process between ends. The system gives an orphan to its
        nearest ancestor that is a "subreaper". The caller is one for this moment.
        """
        message = json.dumps(asdict(program)).encode()
        prctl = ctypes.CDLL(None).prctl
        with self.lock:
            if self.connection is None:
                self.connection = self.start()
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            socket.send_fds(self.connection, [message], stdio)
            reply = self.connection.recv(64)
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not reply:
            raise RuntimeError("the fork server of the tests has ended; its error is in stderr")
        return int(reply)


class Popen(ORIGINAL_POPEN):
    """``subprocess.Popen``, which lets the server fork a program where possible."""

    server: ForkServer | None = None

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        self.program = None if others else Program.from_call(args, options)
        super().__init__(args, *others, **options)

    def _execute_child(self, *given: Any) -> None:
        server = Popen.server
        if server is None or self.program is None or not server.accepts(self.program):
            super()._execute_child(*given)
            return
        # Both ends of the pipes of stdin, stdout and stderr; -1 where there is none.
        pipes = given[10:16]
        ends = [pipes[0], pipes[3], pipes[5]]
        stdio = [own if end == -1 else end for own, end in enumerate(ends)]
        # As Popen itself does, for tests/levels.py.
        sys.audit("subprocess.Popen", sys.executable, self.program.argv, None, None)
        self.pid = server.fork(self.program, stdio)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def install(env: Mapping[str, str]) -> None:
    """Fork the Python programs that this process starts with these variables, where possible."""
    if sys.platform != "linux" or os.environ.get("SAMESTEP_TESTS_FRESH") == "1":
        return
    # A program that was forked itself has a server already.
    if not hasattr(subprocess.Popen, "server"):
        Popen.server = ForkServer(env)
        subprocess.Popen = Popen  # type: ignore[misc]


def serve(connection: socket.socket) -> NoReturn:
    """Fork a process for each program, until the caller ends."""
    while True:
        message, stdio, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            between = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            program = Program(**json.loads(message))
            become(program, stdio, connection)
            run(program)
        os.waitpid(child, 0)
        for descriptor in stdio:
            os.close(descriptor)


def become(program: Program, stdio: Sequence[int], connection: socket.socket) -> None:
    """Give this process what a new process for ``program`` has, and a server of its own."""
    if program.new_session:
        os.setsid()
    else:
        os.setpgid(0, os.getpgid(program.parent))
    for number, descriptor in enumerate(stdio):
        os.dup2(descriptor, number)
    if program.unbuffered or os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(program.cwd)
    os.environ.clear()
    os.environ.update(program.env)
    # Python's own generator has a new seed after a fork.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    # From here on the caller may send signals.
    connection.send(str(os.getpid()).encode())
    os.closerange(3, 64)
    Popen.server = None
    os.execv = partial(replace, program)
    if program.pod:
        runpy.run_path(ENTER_POD)["enter"](*program.pod)
    if program.argv[:2] != ["-m", "samestep.launch.entrypoint"]:
        start_own_server(program)
        return
    # This process only supervises. The agent, which starts the ranks, is the child that it forks.
    supervisor = os.getpid()
    os.register_at_fork(
        after_in_child=lambda: os.getppid() == supervisor and start_own_server(program)
    )


def start_own_server(program: Program) -> None:
    """Fork a server for what this program starts, which must be its own children.

    Call it before the code of the program runs: before its threads and its state.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() > 0:
        theirs.close()
        Popen.server = ForkServer(program.env, ours)
        return
    ours.close()
    os.setpgid(0, 0)
    # The supervisor of an entry point forks its agent with blocked signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    serve(theirs)


def replace(program: Program, path: str, args: Sequence[str]) -> NoReturn:
    """Do in a fork what ``os.execv`` does, if it would run Python code with this interpreter."""
    if path != sys.executable or args[1] != "-c":
        ORIGINAL_EXECV(path, args)
    atexit._clear()
    sys.excepthook = sys.__excepthook__
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if OWN_CODE.match(name)]:
        del sys.modules[name]
    run(changed(program, argv=[*args[1:]]))


def run(program: Program) -> NoReturn:
    """Run a program, and end this process as Python does."""
    exit_code = 0
    try:
        execute(program)
    except BaseException as error:
        exit_code = report(error)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    # They may be closed, also by their reader.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if exit_code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    # Python would take all modules apart now, which costs two seconds in a fork.
    os._exit(exit_code)


def report(error: BaseException) -> int:
    """Print what Python prints about an exception that ends a program; return the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    # Without the frames of this file.
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit as leaving:
        return report(leaving)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def execute(program: Program) -> None:
    """Run the code of a program in a new module ``__main__``."""
    entries = program.env.get("PYTHONPATH", "").split(os.pathsep)
    given = [str(Path(entry).absolute()) for entry in entries if entry]
    installed = [entry for entry in sys.path if entry not in given]
    if program.argv[0] == "-c":
        sys.argv = ["-c", *program.argv[2:]]
        sys.path[:] = ["", *given, *installed]
        exec(program.argv[1], {"__name__": "__main__"})
        return
    if program.argv[0] == "-m":
        sys.argv = program.argv[1:]
        sys.path[:] = [program.cwd, *given, *installed]
        # The one of torch is imported already, and runpy would warn.
        sys.modules.pop(sys.argv[0], None)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = program.argv
    script = Path(program.argv[0]).absolute()
    sys.path[:] = [str(script.resolve().parent), *given, *installed]
    # ``runpy.run_path`` would empty the module when the code ends, and threads may need it.
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=str(script))
    sys.modules["__main__"] = main
    exec(compile(script.read_bytes(), script, "exec"), main.__dict__)


def import_libraries() -> None:
    """Import what programs need, and make sure that a fork has all of it."""
    subprocess.Popen = Popen  # type: ignore[misc]  # before torch imports the name
    # The folder of this file, from which programs import nothing.
    del sys.path[0]
    for name in LIBRARIES:
        # A copy of the template may have left it out.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # torch asks ``inspect.stack()`` for names of callers, which costs an agent 0.7 s here: that
    # compares each frame with all modules.
    dynamic = sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"]
    dynamic.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError("an import has started a thread, which a fork would not have")


if __name__ == "__main__":
    import_libraries()
    serve(socket.socket(fileno=os.dup(0)))
