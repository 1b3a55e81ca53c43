"""The copy of a run in a store: s3://, gs://, file://, a folder.

A run can be resumed from ``<url>/<run_id>/`` at any time, even if an upload was cut off. Files are
uploaded after the files they depend on: history, best checkpoint, last checkpoint. Each checkpoint
contains its manifest, which proves it intact. The library of the store finds its credentials in the
environment.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import IO, Any

import fsspec  # type: ignore[import-untyped]

from samestep.errors import ConfigError
from samestep.ranks.secrets import redact
from samestep.run import manifest, record
from samestep.run.files import partial_of
from samestep.run.layout import BEST, LAST, RECORDS
from samestep.run.manifest import Manifest
from samestep.run.record import Record

log = logging.getLogger(__name__)

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}


class RunCopy:
    """The copy of one run directory, used by one thread.

    A file with its final name is complete. An object store creates an object whole or not at all;
    in a file system the file is written under another name and then renamed.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        check_url(url)
        self.run_dir = run_dir
        self.url = f"{url.rstrip('/')}/{run_dir.absolute().name}"
        self.fs, self.root = self._open(url)
        self.has_objects = _scheme_of(url) in OBJECT_STORES
        # The version of each local file that is in the store.
        self.copied: dict[str, tuple[int, ...]] = {}

    def _open(self, url: str) -> tuple[Any, str]:
        """The file system of the copy, and its path there; errors name the URL of the user."""
        try:
            fs, root = fsspec.url_to_fs(self.url)
        except ImportError as error:
            extra = "'samestep[s3]'" if url.startswith("s3") else str(error)
            raise ConfigError(f"url={redact(url)}: needs pip install {extra}") from error
        except Exception as error:
            # Some stores connect at once, and each raises exceptions of its own.
            why = redact(f"url={url}: {type(error).__name__}: {error}")
            raise ConfigError(
                f"{why}; check the address (s3:// and file:// are supported), or try again later"
            ) from error
        return fs, root

    def names(self, *, final: bool = True) -> list[str]:
        """The files to copy, in the order in which they are uploaded.

        With ``final`` also the report and the predictions. These are not written atomically, so
        they are copied when the run ends.
        """
        names = list(RECORDS)
        for path in manifest.find_checkpoints(self.run_dir / "checkpoints"):
            # A safety net for this disk; the store has intact checkpoints only.
            if path.name != "last-previous.ckpt":
                names.append(f"checkpoints/{path.name}")
        if final:
            names.append("report.html")
            for path in sorted(self.run_dir.glob("predictions/*")):
                names.append(f"predictions/{path.name}")
        # The last one, as it marks the run as finished.
        names.append("metrics.json")
        return [name for name in names if (self.run_dir / name).exists()]

    def left(self) -> list[str]:
        """The files whose newest version is not in the store."""
        left = []
        for name in self.names():
            if self.copied.get(name) != _version((self.run_dir / name).stat()):
                left.append(name)
        return left

    def upload(self, name: str) -> None:
        """Copy a file, after the files it depends on, unless the store has it."""
        try:
            file = (self.run_dir / name).open("rb")
        except FileNotFoundError:
            # It is being replaced; the next scan finds the new one.
            return
        with file:
            version = _version(os.fstat(file.fileno()))
            if self.copied.get(name) == version:
                return
            if not name.endswith(".ckpt"):
                self._put(name, file)
            elif not self._upload_checkpoint(name, file):
                return
            self.copied[name] = version

    def _upload_checkpoint(self, name: str, file: IO[bytes]) -> bool:
        """Copy a checkpoint and what a run needs to resume from it; whether it is in the store."""
        own = manifest.verify(_path_of(file), folder=self.run_dir / "checkpoints")
        if isinstance(own, str):
            raise ValueError(f"a checkpoint is damaged here: {own}")
        shards = [f"checkpoints/{shard}" for shard in own.files()]
        # The test after the training needs best.ckpt, which may be older than last.ckpt.
        needed = [*RECORDS, *shards]
        if name == LAST:
            needed.append(BEST)
        for other in needed:
            self.upload(other)
        if not self.copied.keys() >= set(shards):
            # One was removed meanwhile: a newer checkpoint has replaced this one.
            return False
        # An earlier process may have uploaded it already.
        if self.read_manifest(name) != own:
            self._put(name, file)
            if shards:
                self._prune()
        return True

    def _prune(self) -> None:
        """Remove the shards that no checkpoint in the store names any more."""
        folder = f"{self.root}/checkpoints"
        named = set()
        for path in self.fs.glob(f"{folder}/*.ckpt"):
            own = self.read_manifest(f"checkpoints/{_last_part(path)}")
            if own:
                named.add(own.shards)
        for path in self.fs.glob(f"{folder}/shards-*"):
            if _last_part(path) not in named:
                self.fs.rm(path, recursive=True)

    def read_manifest(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint in the store; None if either does not exist."""
        try:
            tail = self.fs.cat_file(f"{self.root}/{name}", start=-manifest.TAIL_BYTES)
        except FileNotFoundError:
            return None
        return manifest.parse(tail)

    def _put(self, name: str, file: IO[bytes]) -> None:
        source, target = str(_path_of(file)), f"{self.root}/{name}"
        # On macOS all descriptors of an open file share one position, which `verify` has moved.
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        if self.has_objects:
            # No folders either: for a store of objects, makedirs would create a bucket.
            self.fs.put_file(source, target)
            return
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(source, f"{target}.partial")
        self.fs.mv(f"{target}.partial", target)


def check_url(url: str) -> None:
    """Raise a ConfigError if a URL names no place to write, or contains credentials."""
    scheme, separator, place = url.rpartition("://")
    if not separator:
        _check_folder(url)
    if _scheme_of(url) in ("http", "https"):
        raise ConfigError(f"url={redact(url)}: cannot be written; s3:// and file:// can")
    login, _, host = place.rpartition("@")
    if _scheme_of(url) in OBJECT_STORES and ":" in login:
        # The library of the store would take them for the name of the bucket, and print it.
        raise ConfigError(
            f"url={scheme}://***@{host}: holds credentials; write {scheme}://{host}, and give them "
            "by the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not place.strip("/ "):
        raise ConfigError(f"url={redact(url)}: names no bucket or folder, such as s3://bucket/runs")


def _check_folder(path: str) -> None:
    """Reject a mistyped URL such as ``s3:/bucket``: fsspec would create a folder ``s3:`` here."""
    almost = re.match(r"([A-Za-z][\w+.-]*):/*(.*)", path)
    if almost:
        # The text before @ may be a password.
        rest = almost[2].rpartition("@")[2]
        raise ConfigError(
            f"url={almost[1]}:...{rest}: a store is named by two slashes, such as "
            f"{almost[1].lower()}://{rest or 'bucket/runs'}; a folder with a colon begins with ./"
        )


def _scheme_of(url: str) -> str:
    # URLs of fsspec may be chained, as in simplecache::s3://bucket.
    return url.rpartition("://")[0].rpartition("::")[2]


def fetch(url: str, run_dir: Path) -> None:
    """Download the run if its copy has a newer checkpoint than the directory: it ran elsewhere.

    Only valid checkpoints count, so a copy also replaces damaged ones. If the directory has
    checkpoints, a store that cannot be read is only a warning, and a damaged copy is ignored.

    Raises:
        ConfigError: if the store cannot be read and the directory has no checkpoints. To start over
            would overwrite the copy.
    """
    has_checkpoints = any(run_dir.glob("checkpoints/*.ckpt"))
    try:
        copy = RunCopy(url, run_dir)
        if not has_checkpoints:
            _download(copy)
        elif _has_newer(copy) and _download(copy, only_intact=True):
            print(f"The copy in {redact(copy.url)} has a newer checkpoint, and was fetched")
    except Exception as error:
        why = redact(f"url={url} cannot be read: {error}")
        if has_checkpoints:
            log.warning("%s; the run continues from the checkpoints that are here", why)
            return
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{why}. Try again later, or without a store: url=null") from error


def _has_newer(copy: RunCopy) -> bool:
    """Whether the store has a later checkpoint than the directory, and both are of one run."""
    from samestep.run import checkpoint  # torch, which `samestep upload` does not need

    there = copy.read_manifest(LAST)
    if there is None:
        return False
    try:
        found = checkpoint.find_valid(copy.run_dir / "checkpoints")
    except checkpoint.CheckpointError:
        found = None  # all are damaged
    if found and there.global_step <= found[1].global_step:
        return False
    content = json.loads(copy.fs.cat_file(f"{copy.root}/{record.FILE}"))
    theirs = set(Record(starts=content["starts"]).configs)
    ours = set(record.read(copy.run_dir).configs)
    if not theirs or not ours:
        # A record without digests says nothing. The start of the run still compares configurations.
        return True
    return not theirs.isdisjoint(ours)


def _download(copy: RunCopy, *, only_intact: bool = False) -> bool:
    """Fetch what a run needs to resume, and rename all of it at the end; whether it was kept.

    Only these names are fetched, so a store cannot write anywhere else. ``metrics.json``, which
    marks a run as finished, is not among them.
    """
    partials = {}
    for name in (*RECORDS, BEST, LAST):
        partial = partial_of(copy.run_dir / name)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy.fs.get_file(f"{copy.root}/{name}", str(partial))
            partials[name] = partial
        except FileNotFoundError:
            partial.unlink(missing_ok=True)
    for own in manifest.read_all(partials.values()):
        _download_shards(copy, own)
    if only_intact and isinstance(manifest.verify(partial_of(copy.run_dir / LAST)), str):
        for partial in partials.values():
            partial.unlink()
        return False
    # Only now: a download that was cut off leaves the directory as it was.
    for name, partial in partials.items():
        partial.replace(copy.run_dir / name)
    return True


def _download_shards(copy: RunCopy, own: Manifest) -> None:
    folder = copy.run_dir / "checkpoints"
    for shard in own.files():
        # Under their final names: those are never used twice, and no checkpoint names them yet.
        (folder / shard).parent.mkdir(exist_ok=True)
        copy.fs.get_file(f"{copy.root}/checkpoints/{shard}", str(folder / shard))


def _path_of(file: IO[bytes]) -> Path:
    # An open file stays this version, although another one may get its name meanwhile.
    return Path(f"/dev/fd/{file.fileno()}")


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]


def _version(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
