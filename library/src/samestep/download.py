"""Files of data sets, downloaded once for all processes."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from samestep.errors import RunError
from samestep.ranks.secrets import redact

SILENCE_S = 30.0  # after which a server is given up
# What torchvision's sets raise for files that are missing, cut off or garbled.
BROKEN = OSError, RuntimeError, ValueError, AssertionError, EOFError


class DownloadError(RunError):
    """A server does not answer, or gives other files. The next try may succeed: exit code 1."""

    is_final = False


def download_once(
    dataset: Callable[..., Any], root: str | None, *, download: bool, mirror: str | None = None
) -> None:
    """Make the files of a data set present, in ``prepare_data`` of a DataModule.

    If they are there, nothing is written. Otherwise one process of all that share ``root``
    downloads them into a temporary folder, and renames what is complete: one that is killed leaves
    no half of a file behind.

    Args:
        dataset: called with ``root``, ``train`` and ``download``, as the sets of torchvision;
            it raises one of ``BROKEN`` if files are missing or damaged.
        root: directory of the files; None if the data set has none.
        download: whether missing files are downloaded; if not, they are an error.
        mirror: ``http://host/path`` with the files of the official address, to use instead of it.

    Raises:
        RunError: if files are missing or damaged, and must not or cannot be downloaded.
    """
    if root is None:
        return
    fault = find_fault(dataset, root)
    if fault and download:
        if mirror:
            use_mirror(dataset, mirror.rstrip("/"))
        _download(dataset, Path(root))
    elif fault:
        raise RunError(
            f"data.root={root}: {fault}; data.download={str(download).lower()}, and `python "
            "scripts/prepare_data.py data=NAME data.root=FOLDER` downloads what can be downloaded"
        )


def find_fault(dataset: Callable[..., Any], root: str | Path) -> str:
    """What is wrong with the files; an empty text if nothing is."""
    try:
        for train in (True, False):
            dataset(root=root, train=train, download=False)
    except BROKEN as error:
        return str(error) or type(error).__name__
    return ""


def use_mirror(dataset: Any, address: str) -> None:
    """Set the address of a class of torchvision: ``mirrors`` of MNIST, ``url`` of the others."""
    if "@" in address:
        raise RunError(
            f"data.mirror={redact(address)}: has a login, which Python's downloads ignore"
        )
    source = getattr(dataset, "func", dataset)
    source.mirrors = [f"{address}/"]
    source.url = f"{address}/{getattr(source, 'filename', '')}"


def _download(dataset: Callable[..., Any], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    print(f"downloading into {root}, or waiting for another process that does", file=sys.stderr)
    with FileLock(root / ".lock"), TemporaryDirectory(prefix=".download-", dir=root) as folder:
        # Those of killed processes.
        for old in set(root.glob(".download-*")) - {Path(folder)}:
            rmtree(old, ignore_errors=True)
        # Another process may have downloaded them while this one waited.
        if not find_fault(dataset, root):
            return
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(SILENCE_S)
        try:
            dataset(root=folder, train=True, download=True)
        except BROKEN as error:
            raise DownloadError(
                f"cannot download: {redact(' '.join(str(error).split()))}; nothing was kept; "
                "data.mirror=http://host/path downloads from another server"
            ) from error
        finally:
            socket.setdefaulttimeout(before)
        for path in Path(folder).iterdir():
            rmtree(root / path.name, ignore_errors=True)
            path.replace(root / path.name)
