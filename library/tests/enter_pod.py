"""python library/tests/enter_pod.py NETWORK HOSTNAME FOLDER COMMAND...: be process 1 of a pod.

NETWORK is a network namespace that ``ip netns`` knows. FOLDER holds ``hosts-HOSTNAME``, the pod's
/etc/hosts, and ``resolv``, its /etc/resolv.conf. The fork server calls ``enter`` itself, in a
process that it has forked, and runs the command there.
"""

import ctypes
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1  # see prctl(2)
FURNISH = (  # in the namespaces of the pod
    'mount --make-rprivate / && mount -t proc proc /proc && mount -t sysfs sysfs /sys && cd "$1" '
    '&& hostname "$0" && mount --bind "hosts-$0" /etc/hosts && mount --bind resolv /etc/resolv.conf'
)


def enter(network: str, hostname: str, folder: str) -> None:
    """Fork process 1 of a pod, and return there only.

    The process that calls stays outside. It waits, and ends with the same exit code (137 if process
    1 was killed). If it is killed itself, the pod is too: the kernel ends all processes of a pod
    together with its process 1.
    """
    with Path("/run/netns", network).open("rb") as namespace:
        call("setns", namespace.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID)
    process = os.fork()
    if process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    subprocess.run(["bash", "-c", FURNISH, hostname, folder], check=True)
    platform._uname_cache = None  # type: ignore[attr-defined]  # it holds the name of this machine


def call(function: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 does not have."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), function)


if __name__ == "__main__":
    enter(*sys.argv[1:4])
    os.execvp(sys.argv[4], sys.argv[4:])
