"""Start Python programs quickly: fork a process that has already imported the libraries.

``import lightning`` costs about five seconds of processor time, and the tests start several hundred
Python processes. A *fork server* is a fresh interpreter that imports the libraries, starts no
thread, computes nothing, and then forks itself once for each program. The forked process differs
from a fresh interpreter only in what is already imported, and in what Hydra remembers (see
``compose_once`` and ``remember_compositions``); it imports the code of this repository itself. It
is a true child of the process that asked for it: its parent id, its exit code and its signals are
those that ``subprocess`` gives.

Four things do differ. Programs of one server share the seed of Python's hashes, so sets of strings
have one order in all of them. Python does not take its modules apart at the end (see ``Ending``),
so a file that was left open is not flushed; nor does torch its operators. What a library would
print while it is imported is not seen; ``tests/test_fork_server.py`` proves that they print
nothing. And torch's rendezvous names its methods quickly (see ``name_methods_quickly``).

``install()`` replaces ``subprocess.Popen`` by a subclass which does this where nobody can tell the
difference, and starts a fresh interpreter everywhere else. ``SAMESTEP_TESTS_FRESH=1`` switches it
off.

The processes of pytest-xdist are forked too, and so is pytest in a copy of the template. Each of
them then forks a server of its own, for the programs under test, because these must be its
children. So the libraries are imported once.

Read in this order: ``Program`` (which commands qualify), ``ForkServer.fork`` (how the caller gets a
child of its own), ``serve`` and ``become`` (what the forked process sets up before it runs).
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import pickle
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "filelock", "fsspec", "hydra",
    "hydra._internal.core_plugins.basic_launcher", "hydra._internal.core_plugins.basic_sweeper",
    "hydra._internal.core_plugins.file_config_source", "jinja2",
    "kubeflow.trainer", "kubernetes", "lightning",
    "matplotlib.backends.backend_agg", "matplotlib.pyplot", "optuna",
    "optuna.visualization.matplotlib", "sklearn.ensemble", "torch", "torch.distributed.run",
    "torch.utils.tensorboard", "torchvision.transforms.v2",
)  # fmt: skip
"""What the fork server imports.

Not wandb and mlflow, which start threads; not flytekit, which handles signals while it is imported;
not copier, which keeps the variables of that moment. Kubernetes keeps one: see ``tell_kubernetes``.
"""

ENTER_POD = str(Path(__file__).parents[1] / "library/tests/enter_pod.py")

CONFIGS = Path(__file__).parents[1] / "configs"

OVERRIDES = (
    "model=mlp", "trainer.max_epochs=2", "data.file=/a/file.md", "run_root=/tmp/a-b_1", "~report",
    "++a.b=[1,x,0.5]", "+c={d:null,e:'f g'}", "h=true",
)  # fmt: skip
"""Overrides of most kinds, for Hydra's parser to learn from."""

INTERPOLATIONS = ("${run_dir}/checkpoints", "${hydra:run.dir}", "${oc.env:HOME,null}", "a ${b.c}")

AGENTS = ("torch.distributed.run", "samestep.launch.entrypoint", "samestep")
"""Modules that are run with ``python -m`` and start ranks."""

MODULES = (
    *AGENTS, "cProfile", "examples.language.convert", "examples.tables.convert",
    "ipykernel_launcher", "labs.bench.contender", "library.tests.small",
)  # fmt: skip
"""All modules that a fork of the server can run with ``python -m``."""

TEST_WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How pytest-xdist starts a process that runs tests; the code of this process comes by its stdin.

It is the only ``python -c`` that a fork of the server can run.
"""

READ_AT_IMPORT = re.compile(
    "PYTHON(?!PATH$)|LD_|LC_|LANG|MKL_|GOMP_|MPL|CUDA|HOME$|TZ$|TORCH_(LOGS|COMPILE)"
    # The server has one OpenMP thread, which never waits for another.
    "|OMP_(?!WAIT_POLICY)"
)
"""Variables that Python or a library reads while it starts: they must be the fork server's own.

Not PYTHONPATH, from which ``execute`` makes the program's own ``sys.path``. Not KMP_* and
PYTORCH_*, which sklearn and lightning set themselves, also in the process of pytest.
"""

RUN_PYTEST = "run_pytest.py"
"""Name of the scripts that run tests of a copy, which start programs in turn."""

PATH_OF_PYTHON: list[str] = []
"""What ``sys.path`` has behind the directory of the script and PYTHONPATH."""

SET_BY_LIBRARIES: dict[str, str] = {}
"""Variables that the libraries have set in the fork server."""

COMPOSED = ""
"""Folder of what programs have composed; see ``remember_compositions``."""

PRINTED_BY_LIBRARIES = b""
"""What the libraries have printed in the fork server."""

PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)
MADV_COLLAPSE = 25  # see madvise(2)
HUGE_PAGE = 2 << 20  # bytes
ORIGINAL_POPEN = subprocess.Popen
SIGNATURE = inspect.signature(ORIGINAL_POPEN._execute_child)


@dataclass
class Program:
    """A command line that a fork of the server can run, and the surroundings it asks for."""

    pod: list[str]  # the pod that it is process 1 of, as ENTER_POD names it; empty for no pod
    argv: list[str]  # after the options of Python: the script and its arguments
    unbuffered: bool
    cwd: str
    env: dict[str, str]
    new_session: bool
    parent: int

    @classmethod
    def from_call(cls, call: Mapping[str, Any]) -> "Program | None":
        """The program that ``Popen`` is asked for; None if it needs a fresh interpreter."""
        if isinstance(call["args"], str | bytes) or call["shell"] or not call["close_fds"]:
            return None
        if any(call[name] for name in ("executable", "preexec_fn", "pass_fds", "gids")):
            return None
        if any(call[name] not in (None, -1) for name in ("gid", "uid", "umask", "process_group")):
            return None
        python, *argv = map(os.fspath, call["args"])
        pod: list[str] = []
        if python == sys.executable and argv[:1] == [ENTER_POD]:
            pod, (python, *argv) = argv[1:4], argv[4:]
        unbuffered = argv[:1] == ["-u"]
        if unbuffered:
            del argv[0]
        cwd = str(Path(call["cwd"] or ".").absolute())
        if python != sys.executable or not is_program(argv, cwd):
            return None
        env = dict(os.environ if call["env"] is None else call["env"])
        return cls(pod, argv, unbuffered, cwd, env, call["start_new_session"], os.getpid())

    @property
    def module(self) -> str:
        """The module that it runs (``python -m``); empty if it runs a script."""
        return self.argv[1] if self.argv[0] == "-m" else ""

    @property
    def is_test_worker(self) -> bool:
        """Whether it is a process of pytest-xdist."""
        return self.argv == TEST_WORKER

    @property
    def starts_programs(self) -> bool:
        """Whether it runs tests, as a process of pytest-xdist or in a copy."""
        return self.is_test_worker or Path(self.argv[0]).name == RUN_PYTEST

    @property
    def starts_ranks(self) -> bool:
        """Whether it may be an agent or a search, which start Python programs in turn."""
        if "TORCHELASTIC_RUN_ID" in self.env:
            return False  # it is a rank itself
        # Overrides, options of LightningCLI, JSON, and a plan of `samestep verify`.
        words = [*self.argv, self.env.get("SAMESTEP_VERIFY", "")]
        is_local_agent = any(re.search(r"\bdevices\W+([2-9]|auto)", word) for word in words)
        is_search = Path(self.argv[0]).name == "sweep.py" or self.argv[1:2] == ["sweep"]
        return is_local_agent or is_search or self.module in AGENTS


def is_program(argv: Sequence[str], cwd: str) -> bool:
    """Whether these are words for Python that begin with a script, or with one of ``MODULES``.

    ``python -c``, and ``python -m`` with other modules, stay fresh.
    """
    if argv == TEST_WORKER:
        return True
    if argv[:1] == ["-m"]:
        return argv[1] in MODULES
    return bool(argv) and argv[0].endswith(".py") and Path(cwd, argv[0]).is_file()


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in env.items() if READ_AT_IMPORT.match(name)}
    # Without a display it is matplotlib's own choice, and train.py sets it for its ranks.
    return {"MPLBACKEND": "agg"} | found


def variables_of_torch(program: Program) -> dict[str, str]:
    """The variables of a program, as torch is to see them in the fork server."""
    if not program.is_test_worker:
        return program.env
    # tests/hooks.py sets the number of threads itself.
    return program.env | {"OMP_NUM_THREADS": "1"}


class ForkServer:
    """The caller's side of a process that forks programs for it.

    Args:
        connection: a socket to that process; it ends when the socket is closed.
        env: the variables it was started with.
        same_session: whether it is in the session of its caller, as a child must be by default.
    """

    def __init__(
        self, connection: socket.socket, env: Mapping[str, str], *, same_session: bool
    ) -> None:
        self.connection = connection
        self.env = read_at_import(env)
        self.same_session = same_session
        self.owner = os.getpid()  # its forks are no ancestors of the server
        self.lock = threading.Lock()

    def accepts(self, program: Program) -> bool:
        """Whether a fork is the same as a fresh interpreter for this program."""
        session_fits = self.same_session or program.new_session
        variables_fit = read_at_import(variables_of_torch(program)) == self.env
        return session_fits and variables_fit and program.parent == self.owner

    def fork(self, program: Program, stdio: Sequence[int]) -> int:
        """Start a program with these descriptors as its standard streams.

        The server forks twice and the process between ends. An orphan goes to its nearest ancestor
        that is a "subreaper": we are one for this moment, so the program becomes our own child.

        Returns:
            The process id of the program.
        """
        with self.lock:
            set_subreaper(True)
            try:
                socket.send_fds(self.connection, [json.dumps(asdict(program)).encode()], stdio)
                reply = self.connection.recv(64)
            finally:
                set_subreaper(False)
        if not reply:
            raise RuntimeError(f"the fork server of the tests has ended. {self.printed.decode()}")
        return int(reply)

    @property
    def printed(self) -> bytes:
        """What the libraries printed while the server imported them."""
        return PRINTED_BY_LIBRARIES


def set_subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class Popen(ORIGINAL_POPEN):
    """``subprocess.Popen``, but programs in Python are forked from the server where possible."""

    server: ForkServer | None = None

    def _execute_child(self, *given: Any) -> None:
        call = SIGNATURE.bind(self, *given).arguments
        program = Program.from_call(call) if Popen.server else None
        if Popen.server is None or program is None or not Popen.server.accepts(program):
            super()._execute_child(*given)
            return
        wanted = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        stdio = [own if fd == -1 else fd for own, fd in enumerate(wanted)]
        self.pid = Popen.server.fork(program, stdio)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))


class LazyForkServer(ForkServer):
    """A fork server that is started by the first program: many test files start none."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.socket_of_server: socket.socket
        ours, self.socket_of_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours, env, same_session=True)
        self.variables = dict(env)
        self.output = os.memfd_create("output")  # what the server prints
        self.composed = tempfile.TemporaryDirectory(prefix="composed-")
        self.process: subprocess.Popen[bytes] | None = None

    def fork(self, program: Program, stdio: Sequence[int]) -> int:
        with self.lock:
            if self.process is None:
                self.start()
        return super().fork(program, stdio)

    def start(self) -> None:
        descriptor = self.socket_of_server.fileno()
        self.process = ORIGINAL_POPEN(
            [sys.executable, __file__, str(descriptor), self.composed.name],
            env={"MPLBACKEND": "agg"} | self.variables, pass_fds=[descriptor],
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.socket_of_server.close()

    @property
    def printed(self) -> bytes:
        """What the server has printed."""
        return os.pread(self.output, 10_000, 0)

    def close(self) -> None:
        """End the server; programs that it has forked are not its children."""
        self.socket_of_server.close()
        self.connection.close()
        if self.process:
            self.process.wait(60)
        self.composed.cleanup()


def install(env: Mapping[str, str]) -> None:
    """Fork the Python programs that this process starts with these variables, where possible."""
    if sys.platform != "linux" or os.environ.get("SAMESTEP_TESTS_FRESH") == "1":
        return
    if Popen.server is not None:
        return  # this process is itself a fork, and has got its server before its first line
    server = LazyForkServer(env)
    Popen.server = server
    subprocess.Popen = Popen  # type: ignore[misc]
    atexit.register(server.close)


def serve(connection: socket.socket) -> Program:
    """Fork a process for each program that is asked for.

    Returns:
        The program, in the forked process only; the server itself never returns.
    """
    while True:
        message, stdio, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)  # the caller has ended
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                return become(Program(**json.loads(message)), stdio, connection)
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in stdio:
            os.close(descriptor)


def become(program: Program, stdio: Sequence[int], connection: socket.socket) -> Program:
    """Give this process all that a new process for ``program`` has."""
    deadline = time.monotonic() + 60
    while os.getppid() != program.parent:  # until the process between has ended
        if time.monotonic() > deadline:
            os._exit(1)  # the caller has ended too
        time.sleep(0.001)
    if program.new_session:
        os.setsid()
    for number, descriptor in enumerate(stdio):
        os.dup2(descriptor, number)
    os.chdir(program.cwd)
    os.environ.clear()
    os.environ.update(SET_BY_LIBRARIES | program.env)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    # Nobody may see the process id before the process is what it says.
    connection.send(str(os.getpid()).encode())
    connection.close()
    os.closerange(3, 64)
    if program.pod:
        runpy.run_path(ENTER_POD)["enter"](*program.pod)
    Popen.server = None
    if program.starts_programs and (connection := fork_server_of(program, same_session=True)):
        return serve(connection)

    tell_kubernetes(os.environ.get("KUBECONFIG", "~/.kube/config"))

    # Each fresh interpreter has its own seeds; Python's own generator takes a new one at a fork.
    sys.modules["numpy"].random.seed(random.getrandbits(32))
    sys.modules["torch"].default_generator.seed()
    if program.unbuffered:
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = unbuffered(getattr(sys, name), number)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if program.module == "samestep.launch.entrypoint":
        # This process only supervises; the agent is the child that it forks.
        supervisor = os.getpid()
        os.register_at_fork(
            after_in_child=lambda: os.getppid() == supervisor and start_server_of_agent(program)
        )
    elif program.starts_ranks:
        start_server_of_agent(program)
    return program


def tell_kubernetes(place: str) -> None:
    """Tell the client of Kubernetes where its file is; it reads KUBECONFIG when it is imported."""
    for name in ("kubernetes.config", "kubernetes.config.kube_config"):
        if name in sys.modules:  # a copy may have left it out
            sys.modules[name].KUBE_CONFIG_DEFAULT_LOCATION = place


def unbuffered(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    """A standard stream as ``python -u`` has it."""
    raw = io.FileIO(number, "wb", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, "\n", write_through=True)


def fork_server_of(program: Program, *, same_session: bool) -> socket.socket | None:
    """Fork a server for the programs that this process will start.

    It must happen before the code of ``program`` runs: before threads, and before state.

    Returns:
        The connection to serve, in the new process; None in this one.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() > 0:
        theirs.close()
        Popen.server = ForkServer(ours, variables_of_torch(program), same_session=same_session)
        return None
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    return theirs


def start_server_of_agent(program: Program) -> None:
    """Start a fork server for the ranks that this process may start as the agent of torchrun."""
    if connection := fork_server_of(program, same_session=False):
        # A session of its own: signals for the group of the agent are not for the server.
        os.setsid()
        # The supervisor of an entry point forks its agent with blocked signals.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        run_to_the_end(serve(connection))


class Ending:
    """The exit code of a forked program.

    Python takes apart all modules when it ends, which costs two seconds after a fork. A program
    ends as usual up to that point: its threads are waited for, a traceback is printed, and what was
    registered with ``atexit`` runs. Then this, which was registered first and so runs last.
    """

    code: int | None = None  # also after Ctrl-C, when Python ends itself with the signal

    @classmethod
    def at_once(cls) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            cls.code = None  # nobody reads any more, and Python has its own way to say so
        if cls.code is not None:
            os._exit(cls.code)
        gc.unfreeze()  # so that everything is taken apart


def run(program: Program) -> None:
    """Run a program, and note its exit code."""
    try:
        execute(program)
        Ending.code = 0
    except SystemExit as leaving:
        Ending.code = 1
        if leaving.code is None or isinstance(leaving.code, int):
            Ending.code = (leaving.code or 0) & 0xFF
        raise
    except Exception:
        Ending.code = 1
        sys.excepthook = functools.partial(note_exit_code, sys.excepthook)
        raise


def run_to_the_end(program: Program) -> NoReturn:
    """Run a program, and end this process as Python does after the last line of a program.

    A server that was forked within other code uses it: it must not go on in that code.
    """
    try:
        run(program)
    except SystemExit as leaving:
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    except Exception:
        with contextlib.suppress(SystemExit):
            sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()  # Ending.at_once is the last of them
    os._exit(1)


def execute(program: Program) -> None:
    """Run a program as ``python`` does, in a new module ``__main__``."""
    sys.orig_argv = [sys.executable, *program.argv]
    sys.excepthook = excepthook
    given = python_path(program.env)
    sys.path[1:] = [*given, *(entry for entry in PATH_OF_PYTHON if entry not in given)]
    if program.module:
        sys.modules.pop(program.module, None)  # torch's is imported already
        sys.argv = list(program.argv[1:])
        sys.path[0] = program.cwd
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if program.is_test_worker:
        # The tests must find the server that this process has.
        sys.modules["tests.fork_server"] = sys.modules["__main__"]
        sys.modules["__main__"] = main
        sys.argv = ["-c"]
        sys.path[0] = ""
        exec(program.argv[1], main.__dict__)
        return
    sys.modules["__main__"] = main
    sys.argv = list(program.argv)
    script = Path(program.argv[0]).absolute()
    sys.path[0] = str(script.resolve().parent)
    main.__file__ = str(script)
    exec(compile(script.read_bytes(), script, "exec"), main.__dict__)


def python_path(env: Mapping[str, str]) -> list[str]:
    """The directories of PYTHONPATH as a fresh interpreter has them in ``sys.path``."""
    text = env.get("PYTHONPATH")
    return [str(Path(entry).absolute()) for entry in text.split(os.pathsep)] if text else []


def read_path_of_python(env: Mapping[str, str]) -> list[str]:
    """What a fresh interpreter has in ``sys.path`` without PYTHONPATH."""
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    without = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return subprocess.check_output([sys.executable, "-c", code], env=without, text=True).split()


def excepthook(kind: Any, error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a traceback without the frames of this file."""
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def note_exit_code(hook: Any, *error: Any) -> None:
    """Call a program's hook; Python takes the exit code from a SystemExit that it raises."""
    try:
        hook(*error)
    except SystemExit as leaving:
        Ending.code = int(leaving.code or 0)
        raise


def import_libraries() -> None:
    """Import what programs need, and make sure that nothing else has happened."""
    subprocess.Popen = Popen  # type: ignore[misc]  # before torch takes over the name
    before = dict(os.environ)
    PATH_OF_PYTHON.extend(read_path_of_python(before))
    # Beside pandas, which the laboratories have, scikit-learn starts a thread of Arrow's.
    left_out = {"sklearn.ensemble"} if importlib.util.find_spec("pandas") else set()
    for name in LIBRARIES:
        if name in left_out:
            continue
        with contextlib.suppress(ModuleNotFoundError):  # a copy may have left out TensorBoard
            importlib.import_module(name)
    name_methods_quickly()
    keep_operators_to_the_end()
    remember_entry_points()
    trace_no_seeds()
    SET_BY_LIBRARIES.update(os.environ.items() - before.items())
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError("an import has started a thread; a fork would not have it")
    compose_once()
    gc.collect()
    gc.freeze()  # forked processes share these pages as long as nobody writes to them
    use_huge_pages()


def name_methods_quickly() -> None:
    """Spare each agent of torchrun a second, in which it only learns the names of its methods.

    Its rendezvous asks ``inspect.stack()`` for the name of a caller, nine times for each start of
    the ranks. That reads the sources of all frames, and compares each with all modules there are.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def get_method_name(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = get_method_name


def keep_operators_to_the_end() -> None:
    """Spare each program the time in which torch takes back 200 operators before it ends.

    That is most of what a program costs that does nothing. Its memory is given back anyway.
    """
    registered = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer, made in list(registered.items()):
        if made.func.__module__ == "torch.library":
            finalizer.atexit = False


def remember_entry_points() -> None:
    """Spare each Trainer a look into all packages for one that brings callbacks.

    That reads a file of each installed package, an eighth of a short run. Other folders of
    ``sys.path``, which differ from program to program, are asked each time.
    """
    from lightning.fabric.utilities import registry

    original = registry.entry_points
    known = {name: original(group=name) for name in ("lightning.pytorch.callbacks_factory",)}
    looked_into = frozenset(sys.path)

    def entry_points(*, group: str) -> Any:
        others = [folder for folder in sys.path if folder not in looked_into]
        if group not in known or any(has_packages(folder) for folder in others):
            return original(group=group)
        return known[group]

    registry.entry_points = entry_points


def has_packages(folder: str) -> bool:
    return any(Path(folder or ".").glob("*-info"))


def trace_no_seeds() -> None:
    """Spare each seed of torch the stack traces that it keeps for three kinds of devices.

    They are shown if a device that is used later has an error. In a test the stack is deep: the
    traces were an eighth of a short run.
    """
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):
        # Nobody asks the devices whether they are there: after that, no fork could use them.
        module: Any = importlib.import_module(name)
        module.traceback = types.SimpleNamespace(format_stack=list)


def compose_once() -> None:
    """Compose ``configs/`` of this repository: the parsers keep what they learn of a grammar."""
    import hydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.singleton import Singleton
    from omegaconf import grammar_parser
    from omegaconf.basecontainer import BaseContainer

    singletons, resolvers = dict(Singleton._instances), dict(BaseContainer._resolvers)
    OverridesParser.create().parse_overrides(list(OVERRIDES))
    for text in INTERPOLATIONS:
        grammar_parser.parse(text)
    # A fault in a file is for the tests to find.
    composing = hydra.initialize_config_dir(str(CONFIGS), version_base="1.3")
    with contextlib.suppress(Exception), composing:
        hydra.compose("train", return_hydra_config=True)
    Singleton._instances, BaseContainer._resolvers = singletons, resolvers
    remember_compositions()


def remember_compositions() -> None:
    """Let ``hydra.compose`` remember, for all programs, what one of them has composed.

    Each run composes twice, and so does each of its ranks, mostly what was composed before.
    """
    from omegaconf import OmegaConf

    hydra = sys.modules["hydra"]
    original = hydra.compose

    @functools.wraps(original)
    def compose(
        config_name: str | None = None,
        overrides: list[str] | None = None,
        return_hydra_config: bool = False,
    ) -> Any:
        path = composed_file(config_name, overrides or [], return_hydra_config)
        if path is None:
            return original(config_name, overrides, return_hydra_config)
        with contextlib.suppress(OSError):
            cfg = pickle.loads(path.read_bytes())
            OmegaConf.clear_cache(cfg)  # of the time in that program
            return cfg
        cfg = original(config_name, overrides, return_hydra_config)
        # The disk may be full, as some tests want it.
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as file:
            file.write(pickle.dumps(cfg))
            file.flush()
            os.link(file.name, path)
        return cfg

    hydra.compose = compose


def composed_file(name: str | None, overrides: list[str], with_hydra: bool) -> Path | None:
    """The file for what Hydra composes of ``configs/``; None if it composes another folder.

    Its name says all that Hydra reads. The lists of defaults in ``configs/`` name no variables.
    """
    from hydra.core.global_hydra import GlobalHydra

    if not COMPOSED or not GlobalHydra.instance().is_initialized():
        return None
    sources = GlobalHydra.instance().config_loader().get_sources()
    folders = [source.path for source in sources if source.scheme() == "file"]
    if folders != [str(CONFIGS)]:
        return None
    # Of Hydra's own settings, only the search path is known here.
    others = [word for word in overrides if not word.startswith(SEARCH_PATH)]
    if any("hydra" in word for word in others):
        return None
    states = states_of_files([CONFIGS, *searched_folders(overrides)])
    key = repr((name, overrides, with_hydra, Path.cwd(), states))
    return Path(COMPOSED, hashlib.sha256(key.encode()).hexdigest())


SEARCH_PATH = "hydra.searchpath="


def searched_folders(overrides: Sequence[str]) -> list[Path]:
    """The folders that overrides add to ``configs/``, such as those of the examples."""
    found: list[Path] = []
    for word in overrides:
        if word.startswith(SEARCH_PATH):
            found += map(Path, re.findall(r"file://([^'\],]+)", word))
    return found


def states_of_files(folders: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, time and size of each file, which change when the file does."""
    states = []
    for folder in folders:
        for parent, _, files in os.walk(folder):
            for name in files:
                path = Path(parent, name)
                status = path.stat()
                states.append((str(path), status.st_mtime_ns, status.st_size))
    return sorted(states)


def use_huge_pages() -> None:
    """Join the memory of this process into pages of 2 MiB, where the kernel (from 6.1) can.

    A fork copies an entry for each page, and the end of the process frees them: with pages of 4 KiB
    they are most of what a short program costs.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if access == "rw-p" and start < end:
            advise(start, end - start, MADV_COLLAPSE)  # refused where it maps a file


if __name__ == "__main__":
    atexit.register(Ending.at_once)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    COMPOSED = sys.argv[2]
    import_libraries()
    sys.stdout.flush()
    PRINTED_BY_LIBRARIES = os.pread(1, 10_000, 0)
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
