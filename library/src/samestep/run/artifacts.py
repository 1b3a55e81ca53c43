"""A callback that copies the run to a store, and gives its best checkpoint to W&B."""

import logging
import shlex
import threading
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import WandbLogger

from samestep.ranks import environment
from samestep.ranks.lightning_patches import callbacks_of
from samestep.ranks.secrets import redact
from samestep.run.directory import tested_checkpoint
from samestep.run.store import RunCopy

log = logging.getLogger(__name__)

SCAN_S, MAX_DELAY_S = 1.0, 60.0  # between two looks at the run directory; after failures, at most


class Artifacts(L.Callback):
    """Copies the run to a store while it trains, in a thread of rank zero.

    Uploads files that were replaced since the last look, once a second. Failures are retried after
    2, 4, ... 60 seconds, with one warning per kind of error; none ever reaches the training.

    Args:
        url: where the runs are; null copies nothing.
        run_dir: what to copy; its name is the one in the store.
        flush_timeout_s: seconds that ``flush`` waits for what is left.
        wandb: also give the tested checkpoint and ``config.yaml`` to W&B, if it is a logger.
    """

    def __init__(
        self, url: str | None, run_dir: str, flush_timeout_s: float, wandb: bool = False
    ) -> None:
        self.url, self.flush_timeout_s, self.wandb = url, flush_timeout_s, wandb
        self.run_dir = Path(run_dir)
        self.copy = RunCopy(url, self.run_dir) if url else None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="artifacts", daemon=True)
        self._problems: dict[str, str] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start to copy, on rank zero."""
        if self.copy and environment.rank() == 0 and self._thread.ident is None:
            self._thread.start()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give what is tested to W&B as ``run-<run_id>``: its own process copies it."""
        best = f"checkpoints/{tested_checkpoint(self.run_dir)}.ckpt"
        for logger in trainer.loggers if self.wandb else []:
            if isinstance(logger, WandbLogger):
                import wandb

                try:
                    artifact = wandb.Artifact(f"run-{self.run_dir.name}", type="model")
                    for name in (best, "config.yaml"):
                        artifact.add_file(str(self.run_dir / name))
                    logger.experiment.log_artifact(artifact)
                except Exception as error:
                    log.warning("W&B did not take the checkpoint: %s", redact(str(error)))

    def flush(self) -> None:
        """Copy what is left, for ``flush_timeout_s`` at most; then say what could not be."""
        if self.copy is None or self._thread.ident is None:
            return
        self._ending.set()
        self._thread.join(self.flush_timeout_s)
        if left := self.copy.left():
            words = ["samestep", "upload", str(self.run_dir), "--url", str(self.url)]
            why = "; ".join(self._problems.values()) or "the store does not answer"
            command = redact(shlex.join(words))
            text = "Not uploaded: %s (%s). To upload them later: %s"
            log.warning(text, ", ".join(left), redact(why), command)
        else:
            print(f"Uploaded: {redact(self.copy.url)}", flush=True)

    def _work(self) -> None:
        assert self.copy is not None
        delay = SCAN_S
        while True:
            ending = self._ending.is_set()
            failed = [name for name in self.copy.names(final=ending) if not self._try(name)]
            if ending and not failed:
                return
            delay = min(2 * delay, MAX_DELAY_S) if failed else SCAN_S
            if ending:
                threading.Event().wait(delay)
            elif self._ending.wait(delay):
                delay = SCAN_S

    def _try(self, name: str) -> bool:
        assert self.copy is not None
        try:
            self.copy.upload(name)
        except Exception as error:
            why = redact(f"{name}: {type(error).__name__} {error}")
            if type(error).__name__ not in self._problems:
                log.warning("Cannot upload %s; retrying while training continues", why)
            self._problems[type(error).__name__] = why
            return False
        return True


def url_of(trainer: L.Trainer) -> str | None:
    """Where the ``Artifacts`` of a Trainer keeps copies of the runs; None if there are none."""
    urls = [callback.url for callback in callbacks_of(trainer, Artifacts)]
    return next((url for url in urls if url), None)


def flush(trainer: L.Trainer) -> None:
    """Let every ``Artifacts`` of a Trainer copy what is left; call when all files are written."""
    for callback in callbacks_of(trainer, Artifacts):
        callback.flush()
