"""The copy of a run in a store: s3://, gs://, file://, a folder.

``<url>/<run_id>/`` can be continued from at any time, even if the upload was cut off. Files are
uploaded in the order of what they need: history, best checkpoint, last checkpoint. Each checkpoint
proves itself by its manifest. The store's own library finds its credentials in the environment.
"""

import json
import logging
import os
import re
from pathlib import Path

import fsspec  # type: ignore[import-untyped]

from samestep.errors import ConfigError
from samestep.ranks.secrets import redact
from samestep.run import manifest, record
from samestep.run.files import partial_of
from samestep.run.layout import BEST, LAST, RECORDS

log = logging.getLogger(__name__)

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs"}


class RunCopy:
    """The copy of one run directory, used by one thread.

    A file with its final name is complete: a store of objects takes it whole or not at all, and in
    a file system it is written under another name and then renamed.
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
        except Exception as error:
            # Some stores connect at once, and each has exceptions of its own.
            why = redact(f"url={url}: {type(error).__name__}: {error}")
            raise ConfigError(
                f"{why}; check the address (s3:// and file:// are supported), or try again later"
            ) from error
        protocol = self.fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if protocols & {"http", "https"}:
            raise ConfigError(f"url={redact(url)}: cannot be written; s3:// and file:// can")
        self.has_objects = bool(protocols & OBJECT_STORES)
        self.copied: dict[str, tuple[int, ...]] = {}  # version of each local file in the store

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
        """Copy a file, and before it what it needs, unless the store has it."""
        try:
            file = (self.run_dir / name).open("rb")
        except FileNotFoundError:  # it is just being replaced
            return
        with file:
            version = _version(os.fstat(file.fileno()))
            if self.copied.get(name) == version:
                return
            is_sharded = False
            # The open file stays this version, whichever file gets its name meanwhile.
            source = Path(f"/dev/fd/{file.fileno()}")
            if name.endswith(".ckpt"):
                own = manifest.verify(source, folder=self.run_dir / "checkpoints")
                if isinstance(own, str):
                    raise ValueError(f"a checkpoint is damaged here: {own}")
                # What it needs to be continued from: history, best checkpoint, shards.
                needs = [f"checkpoints/{file}" for file in own.files()]
                is_sharded = bool(needs)
                for other in (*RECORDS, *([BEST] if name == LAST else []), *needs):
                    self.upload(other)
                if any(other not in self.copied for other in needs):
                    return  # they were removed meanwhile: a newer checkpoint is there
                if self.read_manifest(name) == own:
                    self.copied[name] = version
                    return
                # On macOS the other descriptor has just moved this one to the end.
                os.lseek(file.fileno(), 0, os.SEEK_SET)
            self._put(name, source)
            self.copied[name] = version
            if is_sharded:
                self._prune()

    def _prune(self) -> None:
        """Remove the shards of checkpoints that have been replaced in the store."""
        folder = f"{self.root}/checkpoints"
        names = [path.rpartition("/")[2] for path in self.fs.glob(f"{folder}/*.ckpt")]
        manifests = [self.read_manifest(f"checkpoints/{name}") for name in names]
        named = {own.shards for own in manifests if own}
        for path in self.fs.glob(f"{folder}/shards-*"):
            if path.rpartition("/")[2] not in named:
                self.fs.rm(path, recursive=True)

    def read_manifest(self, name: str) -> manifest.Manifest | None:
        """The manifest of a checkpoint in the store; None if it is not there, or has none."""
        try:
            tail = self.fs.cat_file(f"{self.root}/{name}", start=-manifest.TAIL_BYTES)
            return manifest.parse(tail)
        except FileNotFoundError:
            return None

    def _put(self, name: str, source: Path) -> None:
        target = f"{self.root}/{name}"
        if self.has_objects:
            # It has no folders either: makedirs would make a bucket.
            self.fs.put_file(str(source), target)
            return
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(source), f"{target}.partial")
        self.fs.mv(f"{target}.partial", target)


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
    if not place.strip("/ "):
        raise ConfigError(f"url={redact(url)}: names no bucket or folder, such as s3://bucket/runs")


def fetch(url: str, run_dir: Path) -> None:
    """Download the run if its copy has a newer checkpoint than the directory: it ran elsewhere.

    Of the checkpoints here only valid ones count: a copy also repairs what is damaged. If there are
    some here, a store that cannot be read is a warning, and a damaged copy is left alone. If there
    are none, it is an error: to start over would overwrite a run.
    """
    has_checkpoints = any(run_dir.glob("checkpoints/*.ckpt"))
    try:
        copy = RunCopy(url, run_dir)
        if not has_checkpoints:
            _download(copy)
        elif _has_newer(copy) and _download(copy, only_intact=True):
            print(f"The copy in {redact(copy.url)} has a newer checkpoint, and was fetched")
    except Exception as error:
        if isinstance(error, ConfigError) and not has_checkpoints:
            raise
        why = redact(f"callbacks.artifacts.url={url} cannot be read: {error}")
        if not has_checkpoints:
            raise ConfigError(f"{why}. Try again later, or without a store: url=null") from error
        log.warning("%s; the run continues from the checkpoints that are here", why)


def _has_newer(copy: RunCopy) -> bool:
    """Whether the store has a later checkpoint than the directory, and both are of one run."""
    from samestep.run import checkpoint  # torch, which uploading does not need

    try:
        found = checkpoint.find_valid(copy.run_dir / "checkpoints")
    except checkpoint.CheckpointError:
        found = None  # all are damaged
    there = copy.read_manifest(LAST)
    if there is None or (found and there.global_step <= found[1].global_step):
        return False
    starts = json.loads(copy.fs.cat_file(f"{copy.root}/run.json"))["starts"]
    theirs = {start["config"] for start in starts if "config" in start}
    ours = set(record.read(copy.run_dir).configs)
    return not (theirs and ours) or bool(theirs & ours)


def _download(copy: RunCopy, *, only_intact: bool = False) -> bool:
    """Fetch what a run continues from, and rename all of it at the end; whether it was kept.

    Only these names are fetched, so a store cannot write anywhere else. ``metrics.json``, which
    ends a run, is not among them.
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
    for partial in list(partials.values()):
        own = manifest.read(partial)
        for file in own.files() if own else []:
            (partial.parent / file).parent.mkdir(exist_ok=True)
            copy.fs.get_file(f"{copy.root}/checkpoints/{file}", str(partial.parent / file))
    is_intact = LAST in partials and isinstance(manifest.verify(partials[LAST]), manifest.Manifest)
    if only_intact and not is_intact:
        for partial in partials.values():
            partial.unlink()
        return False
    for name, partial in partials.items():
        partial.replace(copy.run_dir / name)
    return True


def _version(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
