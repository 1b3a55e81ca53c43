"""A second copy of a run in a store, kept while it trains: s3://, gs://, file://, a folder.

``<url>/<run_id>/`` can be continued from at every moment, whenever its writer is cut off. Files are
copied in an order that sees to it: a checkpoint comes after the history and the best checkpoint
that it belongs to, and after the manifest without which it is not accepted. Keys of the store come
from the environment, where its own library looks for them.
"""

import hashlib
import io
import json
import logging
import os
import shlex
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

import fsspec  # type: ignore[import-untyped]
import lightning as L
from lightning.pytorch.loggers import WandbLogger

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.secrets import redacted

log = logging.getLogger(__name__)

BEST, LAST, MANIFEST = (f"checkpoints/{n}" for n in ("best.ckpt", "last.ckpt", "manifest.json"))
RECORDS = ("config.yaml", "logs/environment.json", "metrics.csv")
SCAN_S, MAX_DELAY_S = 1.0, 60.0  # between two looks at the run directory; after failures, at most
READ_BACK_BYTES = 64 * 2**20  # of larger files only the size is compared
FLAT = {"s3", "s3a", "gs", "gcs", "az", "abfs"}  # stores without folders: asked, they make buckets


class Mirror:
    """The copy of one run directory, for one thread.

    Each file is written under another name, read back, and then renamed: what has its final name is
    whole. Files above 64 MiB are not read back; of them the store must have kept every byte.

    Raises:
        ConfigError: if the URL is of no kind that can be written here.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self.run_dir, self.url = run_dir, f"{url.rstrip('/')}/{run_dir.absolute().name}"
        try:
            self.fs, self.root = fsspec.url_to_fs(self.url)
        except ImportError as error:
            extra = "'project[s3]'" if url.startswith("s3") else str(error)
            raise ConfigError(f"url={redacted(url)}: needs pip install {extra}") from error
        except ValueError as error:
            raise ConfigError(f"url={redacted(url)}: {error}; s3:// and file:// are") from error
        kinds = self.fs.protocol
        self.kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        if self.kinds & {"http", "https"}:
            raise ConfigError(f"url={redacted(url)}: cannot be written; s3:// and file:// can")
        self.copied: dict[str, tuple[int, ...]] = {}  # version of each local file in the store
        self.digests: dict[str, str | None] = {}  # of the files in the store, as far as known

    def names(self, *, final: bool = True) -> list[str]:
        """Files to copy. Pictures are not written at once, and therefore last of all."""
        checkpoints = [p for p in self.run_dir.glob("checkpoints/*.ckpt") if p.name[0] != "."]
        kept = [f"checkpoints/{p.name}" for p in checkpoints if not p.stem.endswith("-previous")]
        pictures = [f"predictions/{path.name}" for path in self.run_dir.glob("predictions/*")]
        names = [*RECORDS, *sorted(kept), *(sorted(pictures) if final else []), "metrics.json"]
        return [name for name in names if (self.run_dir / name).exists()]

    def left(self) -> list[str]:
        """Files that are not in the store as they are here."""
        versions = {name: _version((self.run_dir / name).stat()) for name in self.names()}
        return [name for name, version in versions.items() if self.copied.get(name) != version]

    def upload(self, name: str) -> None:
        """Copy a file unless the store has it. An open file stays what it is when it is replaced.

        Raises:
            Exception: whatever the store raises; it has the older version then.
        """
        try:
            file = (self.run_dir / name).open("rb")
        except FileNotFoundError:  # just being replaced
            return
        with file:
            version = _version(os.fstat(file.fileno()))
            if self.copied.get(name) == version:
                return
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            known = self._digest(name)
            if name.endswith(".ckpt"):
                for other in (*RECORDS, *([BEST] if name == LAST else [])):
                    self.upload(other)
                self._accept(sha256)
            if sha256 != known:
                self._put(name, file, sha256)
            self.copied[name] = version

    def _accept(self, sha256: str) -> None:
        """Have the manifest in the store name a checkpoint to come, and all that are there."""
        if not (self.run_dir / MANIFEST).exists():
            return
        here = json.loads((self.run_dir / MANIFEST).read_text())
        if sha256 not in {entry["sha256"] for entry in here}:
            raise ValueError("a checkpoint is damaged here: its SHA-256 is not in manifest.json")
        try:
            old = self.fs.cat_file(f"{self.root}/{MANIFEST}")
            there = json.loads(old)
        except (FileNotFoundError, ValueError):
            old, there = b"", []
        current = {name: self._digest(f"checkpoints/{name}") for name in {e["name"] for e in there}}
        kept = [e for e in there if e["sha256"] == current[e["name"]] and e not in here]
        new = manifest_text([*kept, *here]).encode()
        if new != old:
            self._put(MANIFEST, io.BytesIO(new), hashlib.sha256(new).hexdigest())

    def _put(self, name: str, file: BinaryIO, sha256: str) -> None:
        path, partial = f"{self.root}/{name}", f"{self.root}/{name}.partial"
        self.digests.pop(name, None)
        if not self.kinds & FLAT:
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
        """Of a file in the store, which is read if another process has left it."""
        if name not in self.digests:
            try:
                self.digests[name] = self._read(f"{self.root}/{name}")
            except FileNotFoundError:
                self.digests[name] = None
        return self.digests[name]

    def _read(self, path: str) -> str:
        with self.fs.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class Artifacts(L.Callback):
    """Copies the run to a store while it trains, in a thread of rank zero that nobody waits for.

    Looks once a second for files that were replaced, so of a file that changes faster than it can
    be copied the newest version is. Failures are tried again after 2, 4, ... 60 seconds, and warned
    of once for each kind of error; none ever reaches the training.

    Args:
        url: where the runs are; null copies nothing.
        run_dir: what to copy; its name is the one in the store.
        flush_timeout_s: seconds that ``flush`` waits for what is left.
        wandb: also give the best checkpoint and ``config.yaml`` to the W&B logger, if there is one.
    """

    def __init__(
        self, url: str | None, run_dir: str, flush_timeout_s: float, wandb: bool = False
    ) -> None:
        self.url, self.flush_timeout_s, self.wandb = url, flush_timeout_s, wandb
        self.run_dir = Path(run_dir)
        self.mirror = Mirror(url, self.run_dir) if url else None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="artifacts", daemon=True)
        self._problems: dict[str, str] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start to copy, on rank zero."""
        if self.mirror and environment.rank() == 0 and self._thread.ident is None:
            self._thread.start()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the best checkpoint to W&B, which copies it in a process of its own."""
        for logger in trainer.loggers if self.wandb else []:
            if isinstance(logger, WandbLogger):
                try:
                    log_to_wandb(logger, self.run_dir)
                except Exception as error:
                    log.warning("W&B did not take the checkpoint: %s", redacted(str(error)))

    def flush(self) -> None:
        """Copy what is left, for ``flush_timeout_s`` at most; then say what could not be."""
        if self.mirror is None or self._thread.ident is None:
            return
        self._ending.set()
        self._thread.join(self.flush_timeout_s)
        if left := self.mirror.left():
            words = ["python", "scripts/upload.py", f"run={self.run_dir}", f"url={self.url}"]
            why = "; ".join(self._problems.values()) or "the store does not answer"
            command = redacted(shlex.join(words))
            text = "Not uploaded: %s (%s). To upload them later: %s"
            log.warning(text, ", ".join(left), redacted(why), command)
        else:
            print(f"Uploaded: {redacted(self.mirror.url)}", flush=True)

    def _work(self) -> None:
        assert self.mirror is not None
        delay = SCAN_S
        while True:
            ending = self._ending.is_set()
            failed = [name for name in self.mirror.names(final=ending) if not self._try(name)]
            if ending and not failed:
                return
            delay = min(2 * delay, MAX_DELAY_S) if failed else SCAN_S
            if ending:
                threading.Event().wait(delay)
            elif self._ending.wait(delay):
                delay = SCAN_S

    def _try(self, name: str) -> bool:
        assert self.mirror is not None
        try:
            self.mirror.upload(name)
        except Exception as error:
            why = redacted(f"{name}: {type(error).__name__} {error}")
            if type(error).__name__ not in self._problems:
                log.warning("Cannot upload %s; it is tried again while training goes on", why)
            self._problems[type(error).__name__] = why
            return False
        return True


def flush(trainer: L.Trainer) -> None:
    """Let every ``Artifacts`` of a Trainer copy what is left; call when all files are written."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Artifacts):
            callback.flush()


def fetch(url: str, run_dir: Path) -> bool:
    """Make a run directory from its copy, whose names are known here: the store chooses none.

    Each file has its final name once all are there; ``metrics.json``, which ends a run, is left.

    Returns:
        Whether the store has the run.

    Raises:
        ConfigError: if it cannot be asked. To begin anew then would overwrite a run.
    """
    mirror, partials = Mirror(url, run_dir), {}
    try:
        try:
            mirror.fs.info(f"{mirror.root}/{RECORDS[0]}")
        except FileNotFoundError:
            return False
        for name in (*RECORDS, MANIFEST, BEST, LAST):  # cut anywhere, it continues from the best
            target = run_dir / name
            partial = target.with_name(f".{target.name}.partial")
            partial.parent.mkdir(parents=True, exist_ok=True)
            try:
                mirror.fs.get_file(f"{mirror.root}/{name}", str(partial))
                partials[partial] = target
            except FileNotFoundError:
                partial.unlink(missing_ok=True)
        for partial, target in partials.items():
            partial.replace(target)
    except Exception as error:
        why = redacted(f"callbacks.artifacts.url={url} cannot be read: {error}")
        raise ConfigError(f"{why}. Repeat it later, or go without: url=null") from error
    return True


def log_to_wandb(logger: WandbLogger, run_dir: Path) -> None:
    """Log the best checkpoint and the configuration as the W&B artifact ``run-<run_id>``."""
    import wandb

    artifact = wandb.Artifact(f"run-{run_dir.name}", type="model")
    for name in (BEST, "config.yaml"):
        artifact.add_file(str(run_dir / name))
    logger.experiment.log_artifact(artifact)


def _version(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
