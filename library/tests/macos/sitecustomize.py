"""Takes away what macOS does not have, in each Python whose path begins with this folder."""

import errno
import os
import resource
import select
import signal
import sys
import types

MISSING: dict[types.ModuleType, str] = {
    os: "memfd_create pidfd_open pipe2 posix_fadvise sched_getaffinity sched_setaffinity",
    select: "epoll poll",  # Python leaves poll out where that of macOS does not work
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
}
HIDDEN = "/dev/shm/", "/proc/", "/sys/"
BYTES = 1024  # ru_maxrss counts them, and not KiB
MAX_RSS = 2  # its place in what getrusage returns

real_stat, real_getrusage = os.stat, resource.getrusage


def hide(event: str, arguments: tuple[object, ...]) -> None:
    """Let nothing open or list what is not there: an audit hook."""
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if isinstance(path, str | os.PathLike) and f"{path}/".startswith(HIDDEN):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def stat(path, *arguments, **named):
    # No audit hook sees it.
    hide("open", (path,))
    return real_stat(path, *arguments, **named)


def getrusage(who):
    usage = list(real_getrusage(who))
    usage[MAX_RSS] *= BYTES
    return resource.struct_rusage(usage)


def fork():
    raise AssertionError("a process with Metal and threads must not be forked")


for module, names in MISSING.items():
    for name in names.split():
        vars(module).pop(name, None)
os.stat, os.fork, resource.getrusage = stat, fork, getrusage
sys.addaudithook(hide)
sys.platform = "darwin"
# What the standard library imports there.
os.environ["_PYTHON_SYSCONFIGDATA_NAME"] = "_sysconfigdata__linux_x86_64-linux-gnu"
sys.modules["_scproxy"] = types.SimpleNamespace(_get_proxy_settings=dict, _get_proxies=dict)
