"""Files of a data set: fetched once for all processes, checked at every start, never half there."""

import contextlib
import http.client
import io
import shlex
import shutil
import socket
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock, Timeout
from torchvision.datasets.utils import calculate_md5, download_url, extract_archive

from samestep.errors import RunError


class DataError(RunError):
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
        timeout_s: seconds of silence after which a server is given up.

    Raises:
        DataError: if a file is missing or damaged and cannot, or may not, be repaired.
    """
    try:
        fault = _fault(root, files)
        if fault and not download:
            where = shlex.quote(f"data.root={root.parent}")
            remedy = f"python scripts/prepare_data.py data={name} {where}"
            raise DataError(f"{fault}, and data.download is false; get it with: {remedy}")
        if fault:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root):
                if _fault(root, files):  # else the last holder of the lock has repaired it
                    _repair(root, (mirror or url).rstrip("/"), archives, files, timeout_s)
    except OSError as error:
        raise DataError(f"cannot use {root} for data set {name}: {error}") from error


def _fault(root: Path, files: Mapping[str, str]) -> str:
    """What is wrong with the first bad file; empty if all are intact."""
    for file, md5 in files.items():
        path = root / file
        if not path.is_file():
            return f"{path} is missing"
        if (found := calculate_md5(path)) != md5:
            return f"{path} is damaged: md5 {found}, expected {md5}"
    return ""


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
    for stale in root.glob(".download-*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as folder:
        extracted = Path(folder, "extracted")
        extracted.mkdir()
        for archive, md5 in archives.items():
            if _fault(root, {archive: md5}):
                _download(f"{url}/{archive}", Path(folder, archive), md5, timeout_s)
                Path(folder, archive).replace(root / archive)
            try:
                extract_archive(root / archive, extracted)  # refuses members that leave the folder
            except (tarfile.TarError, zlib.error, EOFError, RuntimeError) as error:
                raise DataError(f"{root / archive} cannot be extracted: {error}") from error
        if fault := _fault(extracted, files):
            raise DataError(f"the archives of {url} do not hold the expected files: {fault}")
        for file in files:
            (root / file).parent.mkdir(exist_ok=True)
            (extracted / file).replace(root / file)


def _download(address: str, target: Path, md5: str, timeout_s: float) -> None:
    print(f"downloading {address}", file=sys.stderr)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout_s)
    try:
        # Where there is no terminal, a progress bar would be thousands of lines.
        bar = sys.stderr if sys.stderr.isatty() else io.StringIO()
        with contextlib.redirect_stderr(bar):
            download_url(address, target.parent, target.name)
        if (found := calculate_md5(target)) != md5:
            raise ValueError(f"md5 {found}, expected {md5}; nothing was kept")
    except (OSError, http.client.HTTPException, ValueError) as error:
        remedy = "data.mirror=http://host/path fetches from another server"
        raise DataError(f"cannot download {address}: {error}; {remedy}") from error
    finally:
        socket.setdefaulttimeout(before)
