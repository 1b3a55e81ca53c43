"""A callback that copies the run to a store, and uploads its best checkpoint to W&B."""

import logging
import shlex
import threading
import time
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import WandbLogger

from samestep.ranks import environment
from samestep.ranks.secrets import redact
from samestep.run import store
from samestep.run.copies import KeepsCopy
from samestep.run.manifest import tested_checkpoint
from samestep.run.store import RunCopy

log = logging.getLogger(__name__)

SCAN_S = 1.0  # between two scans of the run directory
MAX_DELAY_S = 60.0  # between two attempts after failures
MIN_PAUSE_S = 10.0  # between two uploads of one file, while the run trains
PAUSE = 10  # times what an upload has taken, before the next one of this file


class Artifacts(KeepsCopy):
    """Copies the run to a store while it trains, in a thread of rank zero.

    Once a second it uploads the files that have changed, each for a tenth of the time at most, and
    every ten seconds. Failures are retried after 2, 4, ... 60 seconds, with one warning for each
    kind of error. They never interrupt the training.

    Args:
        url: folder of all runs in the store; null copies nothing.
        run_dir: directory to copy; it has the same name in the store.
        flush_timeout_s: seconds that ``flush`` waits for the remaining files.
        wandb: also upload the tested checkpoint and ``config.yaml`` to W&B, if it is a logger.
    """

    def __init__(
        self, url: str | None, run_dir: str, flush_timeout_s: float, wandb: bool = False
    ) -> None:
        self.url, self.flush_timeout_s, self.wandb = url, flush_timeout_s, wandb
        self.run_dir = Path(run_dir)
        self.copy = RunCopy(url, self.run_dir) if url else None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._problems: dict[str, str] = {}
        self._next: dict[str, float] = {}
        """When each file that was uploaded may be uploaded again."""

    def fetch(self, run_dir: Path) -> None:
        """Download the run if its copy is newer; see ``store.fetch``."""
        if self.url:
            store.fetch(self.url, run_dir)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start to copy, on rank zero."""
        if self.copy is None or environment.rank() != 0 or stage not in ("fit", "test"):
            return
        # `flush` has ended the thread at the end of an earlier stage.
        if self._thread is None or not self._thread.is_alive():
            self._ending.clear()
            self._thread = threading.Thread(target=self._work, name="artifacts", daemon=True)
            self._thread.start()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Upload the tested checkpoint to W&B as the artifact ``run-<run_id>``."""
        if not self.wandb:
            return
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                self._upload_to_wandb(logger)

    def _upload_to_wandb(self, logger: WandbLogger) -> None:
        import wandb

        best = f"checkpoints/{tested_checkpoint(self.run_dir)}.ckpt"
        try:
            artifact = wandb.Artifact(f"run-{self.run_dir.name}", type="model")
            artifact.add_file(str(self.run_dir / best))
            artifact.add_file(str(self.run_dir / "config.yaml"))
            # W&B's own process uploads it, also after the run has ended.
            logger.experiment.log_artifact(artifact)
        except Exception as error:
            log.warning("W&B did not take the checkpoint: %s", redact(str(error)))

    def flush(self) -> None:
        """Copy the remaining files, for ``flush_timeout_s`` at most; report what is missing."""
        if self._thread is None:
            return
        assert self.copy is not None
        self._ending.set()
        self._thread.join(self.flush_timeout_s)
        left = self.copy.left()
        if not left:
            print(f"Uploaded: {redact(self.copy.url)}", flush=True)
            return
        words = ["samestep", "upload", str(self.run_dir), "--url", str(self.url)]
        command = redact(shlex.join(words))
        why = "; ".join(self._problems.values()) or "the store does not answer"
        text = "Not uploaded: %s (%s). To upload them later: %s"
        log.warning(text, ", ".join(left), redact(why), command)

    def _work(self) -> None:
        """Copy until ``flush`` is called and everything is in the store."""
        delay = SCAN_S
        while True:
            # Read before the scan: a file that was written before `flush` must not be missed.
            ending = self._ending.is_set()
            succeeded = self._scan(final=ending)
            if ending and succeeded:
                return
            delay = SCAN_S if succeeded else min(2 * delay, MAX_DELAY_S)
            if ending:
                threading.Event().wait(delay)
            elif self._ending.wait(delay):
                # `flush` waits now, so the delays start from the shortest one again.
                delay = SCAN_S

    def _scan(self, *, final: bool) -> bool:
        """Upload all files that have changed; whether all uploads succeeded."""
        assert self.copy is not None
        succeeded = True
        for name in self.copy.names(final=final):
            # A small net is saved every two seconds. A store may keep each version, and has a price
            # for each request.
            is_early = time.monotonic() < self._next.get(name, 0)
            if is_early and not final:
                continue
            # Also after a failure: a store that rejects a large file may take the small ones.
            if not self._try(name):
                succeeded = False
        return succeeded

    def _try(self, name: str) -> bool:
        assert self.copy is not None
        before, started = self.copy.copied.get(name), time.monotonic()
        try:
            self.copy.upload(name)
        except Exception as error:
            kind = type(error).__name__
            why = redact(f"{name}: {kind} {error}")
            # Once per kind: an hour without the store would fill the log otherwise.
            if kind not in self._problems:
                log.warning("Cannot upload %s; retrying while training continues", why)
            self._problems[kind] = why
            return False
        if self.copy.copied.get(name) != before:
            now = time.monotonic()
            self._next[name] = now + max(MIN_PAUSE_S, PAUSE * (now - started))
        return True
