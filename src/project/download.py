"""Files of a data set: fetched once for all processes, checked at every start, never half there."""

import contextlib
import errno
import http.client
import io
import os
import shlex
import shutil
import socket
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError

from filelock import FileLock, Timeout
from torchvision.datasets.utils import calculate_md5, download_url, extract_archive

_ATTEMPTS = 3
_TEMPORARY = ".download-"


class DataError(RuntimeError):
    """Data that is missing or damaged: one message for the person, exit code 1."""

    def __str__(self) -> str:
        """The message alone, also after a loader's worker process has put a traceback around it."""
        return super().__str__().rpartition("DataError: ")[2].strip()


def fetch(
    root: Path,
    *,
    url: str,
    archives: Mapping[str, str],
    files: Mapping[str, str],
    mirror: str | None,
    download: bool,
    name: str,
    timeout_s: float = 30.0,
) -> None:
    """Make every one of ``files`` present in ``root`` and intact.

    Intact files are read once and need no network and no right to write. Else missing archives are
    downloaded into a temporary folder, checked, extracted, checked again, and renamed into place,
    under a lock for which all processes and nodes that share ``root`` wait: whoever is killed, at
    any moment, leaves nothing half done under a final name. The archives are kept: they repair
    damaged files without a network, and ``root`` behind any web server is a mirror.

    Args:
        root: directory of this data set.
        url: address below which the archives lie.
        archives: name to md5, in hexadecimal.
        files: path below ``root`` to md5, of the extracted files that will be read.
        mirror: address to use instead of ``url``.
        download: repair what is wrong; else it is an error.
        name: of the data set on the command line, ``data=<name>``.
        timeout_s: seconds of silence after which an attempt is given up; there are three, with a
            tenth of it between them.

    Raises:
        DataError: if a file is missing or damaged and ``download`` is false, if a server does not
            deliver an archive with the right md5, or if ``root`` cannot be read or written.
    """
    try:
        fault = _first_fault(root, files)
        where = f"data.root={root.parent}"
        if fault and not download:
            remedy = f"python scripts/prepare_data.py data={name} {shlex.quote(where)}"
            raise DataError(f"{fault}, and data.download is false; get it with: {remedy}")
        if fault:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root):
                if _first_fault(root, files):  # else the last holder of the lock has repaired it
                    _repair(root, (mirror or url).rstrip("/"), archives, files, timeout_s)
    except OSError as error:
        raise DataError(f"cannot use {root} for data set {name}: {error}") from error


def _first_fault(root: Path, files: Mapping[str, str]) -> str:
    """What is wrong with the first bad file; empty if all are intact."""
    return next(filter(None, (_fault(root / file, md5) for file, md5 in files.items())), "")


def _fault(path: Path, md5: str) -> str:
    if not path.is_file():
        return f"{path} is missing"
    found = calculate_md5(path)
    return "" if found == md5 else f"{path} is damaged: md5 {found}, expected {md5}"


def _lock(root: Path) -> contextlib.AbstractContextManager[object]:
    """Wait for, and take, the lock of ``root``. The kernel frees it when its holder dies."""
    lock = FileLock(root / ".lock")
    try:
        return lock.acquire(timeout=1)
    except Timeout:
        print(f"waiting for another process that is filling {root}", file=sys.stderr)
        return lock.acquire()


def _repair(
    root: Path, url: str, archives: Mapping[str, str], files: Mapping[str, str], timeout_s: float
) -> None:
    for stale in root.glob(f"{_TEMPORARY}*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=root) as folder:
        extracted = Path(folder, "extracted")
        extracted.mkdir()
        for archive, md5 in archives.items():
            if _fault(root / archive, md5):
                _download(f"{url}/{archive}", Path(folder, archive), md5, timeout_s)
                _place(Path(folder, archive), root / archive)
            try:
                extract_archive(root / archive, extracted)  # refuses members that leave the folder
            except (tarfile.TarError, zlib.error, EOFError, RuntimeError) as error:
                raise DataError(f"{root / archive} cannot be extracted: {error}") from error
        for file, md5 in files.items():
            if fault := _fault(extracted / file, md5):
                raise DataError(f"the archives of {url} do not hold the expected files: {fault}")
            _place(extracted / file, root / file)


def _download(address: str, target: Path, md5: str, timeout_s: float) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        print(f"downloading {address}", file=sys.stderr)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
                socket.setdefaulttimeout(timeout_s)
                if not sys.stderr.isatty():  # a progress bar would be thousands of lines
                    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                download_url(address, target.parent, target.name, md5)
            return
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason = str(error) or type(error).__name__
            if isinstance(error, RuntimeError) and target.is_file():  # torchvision names no md5
                reason = f"md5 {calculate_md5(target)}, expected {md5}; nothing was kept"
            refused = isinstance(error, HTTPError) and error.code < 500
            if attempt == _ATTEMPTS or refused or isinstance(error, ValueError):
                remedy = "data.mirror=http://host/path fetches from another server"
                raise DataError(f"cannot download {address}: {reason}; {remedy}") from error
        print(f"attempt {attempt} of {_ATTEMPTS} failed: {reason}", file=sys.stderr)
        time.sleep(timeout_s / 10)


def _place(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target`` once its bytes are on the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
