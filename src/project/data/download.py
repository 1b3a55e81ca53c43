"""Download the files of a data set once for all processes, and verify them at every start."""

import contextlib
import gzip
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pooch
from filelock import FileLock, Timeout

from samestep import RunError, redact

# Pooch would print the address with its password. `_download` prints a line of its own.
pooch.get_logger().setLevel("ERROR")


class DataError(RunError):
    """Data files are missing or damaged, and another try would find them so again."""


class DownloadError(DataError):
    """A server does not answer, or gives other files. The next try may succeed: exit code 1."""

    is_final = False


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
    """Make sure that each of ``files`` is in ``root`` and intact.

    Intact files are read once, without a network or the right to write. Otherwise one process of
    all that share ``root`` downloads the missing archives into a temporary folder, verifies and
    extracts them, and renames: one that is killed leaves no incomplete file under a final name. The
    archives are kept: they repair damaged files, and a web server that serves ``root`` is a mirror.

    Args:
        root: directory of this data set.
        url: address of the folder with the archives, http or https.
        archives: name of each archive, ``.gz``, ``.tar.*`` or ``.zip``, and its md5.
        files: path below ``root`` of each extracted file, and its md5.
        mirror: address to use instead of ``url``.
        download: repair what is missing or damaged; if false, it is an error.
        name: name of the data set on the command line, ``data=<name>``.
        timeout_s: seconds of silence after which a server is given up.

    Raises:
        DataError: if a file is missing or damaged, and cannot or must not be repaired.
    """
    for file in (name, *archives, *files):
        # With --download these names may come from the run directory of somebody else.
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise DataError(f"{file}: the files of a data set must lie below data.root")
    try:
        fault = _find_fault(root, files)
        if fault and not download:
            place = shlex.quote(f"data.root={root.parent}")
            raise DataError(
                f"{fault}, and data.download is false; fill a volume of Kubernetes by `samestep "
                f"launch cluster=k8s data={name} --data` with the cluster.image and cluster.volume "
                "of the run, any other folder by "
                f"python scripts/prepare_data.py data={name} {place}"
            )
        if fault:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root):
                # Another process may have repaired the files while this one waited.
                if _find_fault(root, files):
                    _repair(root, (mirror or url).rstrip("/"), archives, files, timeout_s)
    except OSError as error:
        raise DataError(f"cannot use {root} for data set {name}: {error}") from error


def _find_fault(root: Path, files: Mapping[str, str]) -> str:
    """Say what is wrong with the first bad file; an empty text if all are intact."""
    for file, md5 in files.items():
        path = root / file
        if not path.is_file():
            return f"{path} is missing"
        if (found := pooch.file_hash(path, alg="md5")) != md5:
            return f"{path} is damaged: md5 {found}, expected {md5}"
    return ""


def _lock(root: Path) -> contextlib.AbstractContextManager[object]:
    """Wait for the lock of ``root`` and take it. The kernel frees it if its holder is killed."""
    lock = FileLock(root / ".lock")
    try:
        return lock.acquire(timeout=1)
    except Timeout:
        print(f"waiting for another process that is filling {root}", file=sys.stderr)
        return lock.acquire()


def _repair(
    root: Path, url: str, archives: Mapping[str, str], files: Mapping[str, str], timeout_s: float
) -> None:
    """Download the archives that are missing or damaged, and replace all ``files``."""
    # A process that was killed has left its temporary folder behind.
    for stale in root.glob(".download-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as folder:
        extracted = Path(folder, "extracted")
        extracted.mkdir()
        for archive, md5 in archives.items():
            if _find_fault(root, {archive: md5}):
                _download(f"{url}/{archive}", Path(folder, archive), md5, timeout_s)
                Path(folder, archive).replace(root / archive)
            try:
                _extract(root / archive, extracted)
            except Exception as error:  # each format has errors of its own
                raise DataError(f"{root / archive} cannot be extracted: {error}") from error
        if fault := _find_fault(extracted, files):
            raise DataError(
                f"the archives of {redact(url)} do not hold the expected files: {fault}"
            )
        for file in files:
            (root / file).parent.mkdir(exist_ok=True)
            (extracted / file).replace(root / file)


def _extract(archive: Path, folder: Path) -> None:
    """Extract an archive; a member that would be written outside of ``folder`` is an error."""
    if archive.suffix == ".gz" and ".tar" not in archive.suffixes:
        with gzip.open(archive) as packed, (folder / archive.stem).open("wb") as file:
            shutil.copyfileobj(packed, file)
    elif archive.suffix == ".zip":
        shutil.unpack_archive(archive, folder)
    else:
        # Not `pooch.Untar`: before Python 3.12 it lets members and links out of the folder.
        shutil.unpack_archive(archive, folder, filter="data")


def _download(address: str, target: Path, md5: str, timeout_s: float) -> None:
    """Download one file and verify it."""
    print(redact(f"downloading {address}"), file=sys.stderr)
    # Without a terminal, a progress bar would print thousands of lines.
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=timeout_s)
    try:
        pooch.retrieve(address, f"md5:{md5}", target.name, target.parent, downloader=downloader)
    except (OSError, ValueError) as error:
        # The first of several errors, each raised while another library handled the one before.
        reason: BaseException = error
        while reason.__context__:
            reason = reason.__context__
        raise DownloadError(
            redact(f"cannot download {address}: {reason}").rstrip(".")
            + "; nothing was kept; data.mirror=http://host/path fetches from another server"
        ) from error
