"""The copy of a run in a store: s3://, gs://, file://, a folder.

``<url>/<run_id>/`` can be continued from at any time, even if the upload was cut off. Files are
uploaded in the order of what they need: history, best checkpoint, last checkpoint. Each checkpoint
proves itself by its seal. Keys of the store come from the environment, where its own library looks
for them.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO

import fsspec  # type: ignore[import-untyped]

from samestep.errors import ConfigError
from samestep.ranks.secrets import redact
from samestep.run import seal
from samestep.run.identity import read_identity

log = logging.getLogger(__name__)

BEST, LAST = "checkpoints/best.ckpt", "checkpoints/last.ckpt"
RECORDS = ("config.yaml", "run.json", "metrics.csv")
READ_BACK_BYTES = 64 * 2**20  # of larger files only the size is compared
# Stores of objects have no folders; makedirs would make a bucket.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs"}


class RunCopy:
    """The copy of one run directory, used by one thread.

    Each file is written under another name, read back, and then renamed: a file with its final
    name is whole. Files above 64 MiB are not read back; only their size is compared.

    Raises:
        ConfigError: if nothing can be written to such a URL.
        Exception: whatever a store raises that connects at once, such as ftp://.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.url = f"{url.rstrip('/')}/{run_dir.absolute().name}"
        check_url(url)
        try:
            self.fs, self.root = fsspec.url_to_fs(self.url)
        except ImportError as error:
            extra = "'project[s3]'" if url.startswith("s3") else str(error)
            raise ConfigError(f"url={redact(url)}: needs pip install {extra}") from error
        except ValueError as error:
            raise ConfigError(f"url={redact(url)}: {error}; s3:// and file:// are") from error
        kinds = self.fs.protocol
        self.kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        if self.kinds & {"http", "https"}:
            raise ConfigError(f"url={redact(url)}: cannot be written; s3:// and file:// can")
        self.copied: dict[str, tuple[int, ...]] = {}  # version of each local file in the store
        self.digests: dict[str, str | None] = {}  # of the files in the store, as far as known

    def names(self, *, final: bool = True) -> list[str]:
        """Files to copy. Pictures are not written atomically, and are therefore copied last."""
        checkpoints = [p for p in self.run_dir.glob("checkpoints/*.ckpt") if p.name[0] != "."]
        kept = [f"checkpoints/{p.name}" for p in checkpoints if p.name != "last-previous.ckpt"]
        pictures = [f"predictions/{path.name}" for path in self.run_dir.glob("predictions/*")]
        looks = ["report.html", *sorted(pictures)] if final else []
        names = [*RECORDS, *sorted(kept), *looks, "metrics.json"]
        return [name for name in names if (self.run_dir / name).exists()]

    def left(self) -> list[str]:
        """Files that are not in the store as they are here."""
        versions = {name: _version((self.run_dir / name).stat()) for name in self.names()}
        return [name for name, version in versions.items() if self.copied.get(name) != version]

    def upload(self, name: str) -> None:
        """Copy a file, and before it what it needs, unless the store has it.

        A file that is replaced meanwhile stays open here as it was.

        Raises:
            Exception: whatever the store raises; it has the older version then.
        """
        try:
            file = (self.run_dir / name).open("rb")
        except FileNotFoundError:  # it is just being replaced
            return
        with file:
            version = _version(os.fstat(file.fileno()))
            if self.copied.get(name) == version:
                return
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if name.endswith(".ckpt"):
                # What it needs to be continued from: history and best checkpoint.
                for other in (*RECORDS, *([BEST] if name == LAST else [])):
                    self.upload(other)
                if isinstance(why := seal.verify(self.run_dir / name), str):
                    raise ValueError(f"a checkpoint is damaged here: {why}")
            if sha256 != self._digest(name):
                self._put(name, file, sha256)
            self.copied[name] = version

    def read_seal(self, name: str) -> seal.Seal | None:
        """The seal of a checkpoint in the store; None if it is not there, or has none."""
        try:
            return seal.parse(self.fs.cat_file(f"{self.root}/{name}", start=-seal.TAIL_BYTES))
        except FileNotFoundError:
            return None

    def _put(self, name: str, file: BinaryIO, sha256: str) -> None:
        path, partial = f"{self.root}/{name}", f"{self.root}/{name}.partial"
        self.digests.pop(name, None)
        if not self.kinds & OBJECT_STORES:
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        file.seek(0)
        with self.fs.open(partial, "wb") as target:
            shutil.copyfileobj(file, target, 2**20)
        self.fs.invalidate_cache()
        whole = self.fs.info(partial)["size"] == file.tell()
        if not whole or (file.tell() <= READ_BACK_BYTES and self._read(partial) != sha256):
            raise OSError(f"the store did not keep what it was given of {name}")
        self.fs.mv(partial, path)
        self.digests[name] = sha256

    def _digest(self, name: str) -> str | None:
        """Digest of a file in the store, which is read if another process has left it there."""
        if name not in self.digests:
            try:
                self.digests[name] = self._read(f"{self.root}/{name}")
            except FileNotFoundError:
                self.digests[name] = None
        return self.digests[name]

    def _read(self, path: str) -> str:
        with self.fs.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def open_copy(url: str, run_dir: Path) -> RunCopy:
    """The copy of a run that is about to train; every error is a ConfigError."""
    try:
        return RunCopy(url, run_dir)
    except ConfigError:
        raise
    except Exception as error:
        why = redact(f"callbacks.artifacts.url={url}: {type(error).__name__} {error}")
        raise ConfigError(f"{why}. Repeat it later, or go without: url=null") from error


def check_url(url: str) -> None:
    """Raise a ConfigError if a URL names no place, or holds the credentials of a bucket."""
    kind, separator, place = url.rpartition("://")
    if not separator and (almost := re.match(r"([A-Za-z][\w+.-]*):/*(.*)", url)):
        # fsspec would make a folder of this name here. Such a text may hold a password too.
        rest = almost[2].rpartition("@")[2]
        raise ConfigError(
            f"url={almost[1]}:...{rest}: a store is named by two slashes, such as "
            f"{almost[1].lower()}://{rest or 'bucket/runs'}; a folder with a colon begins with ./"
        )
    login, _, host = place.rpartition("@")
    if kind.rpartition("::")[2] in OBJECT_STORES and ":" in login:
        # Its library would take them for the name of the bucket, and print that.
        raise ConfigError(
            f"url={kind}://***@{host}: holds credentials; write {kind}://{host}, and give them by "
            "the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    is_kind = re.fullmatch(r"[a-z][a-z0-9+.-]*(::[a-z0-9+.-]+)*", kind) is not None
    if separator and not is_kind:
        raise ConfigError(f"url={redact(url)}: names no kind of store; s3:// and file:// are")
    if not place.strip("/ "):
        raise ConfigError(f"url={redact(url)}: names no bucket or folder, such as s3://bucket/runs")


def fetch(url: str, run_dir: Path) -> bool:
    """Download a run; return whether the store has it.

    Only known names are fetched, so a store cannot write anywhere else. Each file gets its final
    name once all are there. ``metrics.json``, which ends a run, is left.

    Raises:
        ConfigError: if the store cannot be asked, or has checkpoints without their configuration.
            To begin anew then would overwrite a run.
    """
    copy = open_copy(url, run_dir)
    try:
        if not copy.fs.exists(f"{copy.root}/{RECORDS[0]}"):
            left = [name for name in (LAST, BEST) if copy.fs.exists(f"{copy.root}/{name}")]
            if not left:
                return False
            raise ConfigError(
                f"{redact(copy.url)} has {left[0]} and no {RECORDS[0]}: this run would overwrite "
                f"it. Restore {RECORDS[0]} there, or use another name (RUN_ID=...)"
            )
        for partial, target in _download_all(copy).items():
            partial.replace(target)
    except ConfigError:
        raise
    except Exception as error:
        why = redact(f"callbacks.artifacts.url={url} cannot be read: {error}")
        raise ConfigError(f"{why}. Repeat it later, or go without: url=null") from error
    return True


def fetch_newer(url: str, run_dir: Path) -> None:
    """Download the run if its copy has a later checkpoint than the directory: it ran elsewhere.

    Of the checkpoints here only valid ones count: a copy also repairs what is damaged. A store that
    cannot be read is a warning: the run can continue from what is here.
    """
    try:
        copy = RunCopy(url, run_dir)
        here = _newest_valid_step(run_dir)
        there = copy.read_seal(LAST)
        if there is None or there.global_step <= here or not _is_same_run(copy):
            return
        partials = _download_all(copy)
        last = next(partial for partial, path in partials.items() if path == run_dir / LAST)
        is_intact = isinstance(seal.verify(last), seal.Seal)
        for partial, target in partials.items():
            if is_intact:
                partial.replace(target)
            else:
                partial.unlink()
        if is_intact:
            print(f"The copy in {redact(copy.url)} has a newer checkpoint, and was fetched")
    except Exception as error:
        why = redact(f"callbacks.artifacts.url={url} cannot be read: {error}")
        log.warning("%s; the run continues from the checkpoints that are here", why)


def _is_same_run(copy: RunCopy) -> bool:
    """Whether the copy is of the run in the directory, as far as their records say."""
    starts = json.loads(copy.fs.cat_file(f"{copy.root}/run.json"))["starts"]
    there = {start["config"] for start in starts if "config" in start}
    here = set(read_identity(copy.run_dir).configs)
    return not (here and there) or bool(here & there)


def _newest_valid_step(run_dir: Path) -> int:
    """The step of the newest checkpoint here that can be continued from; -1 if there is none."""
    from samestep.run import checkpoint  # torch, which uploading does not need

    try:
        found = checkpoint.find_valid(run_dir / "checkpoints")
    except checkpoint.CheckpointError:
        return -1  # all are damaged
    return found[1].global_step if found else -1


def _download_all(copy: RunCopy) -> dict[Path, Path]:
    """Fetch what a run continues from under hidden names: from each of them to its final name."""
    partials = {}
    for name in (*RECORDS, BEST, LAST):
        if partial := _download(copy, name):
            partials[partial] = copy.run_dir / name
    return partials


def _download(copy: RunCopy, name: str) -> Path | None:
    """Fetch one file under a hidden name; None if the store does not have it."""
    target = copy.run_dir / name
    partial = target.with_name(f".{target.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        copy.fs.get_file(f"{copy.root}/{name}", str(partial))
    except FileNotFoundError:
        partial.unlink(missing_ok=True)
        return None
    return partial


def _version(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
