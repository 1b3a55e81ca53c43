"""Does harm to a run at a named moment, and writes down every step, so that nothing can hide."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from labs.faults import store
from library.tests import etcd_server
from library.tests.programs import until
from samestep.data import loader
from samestep.errors import ConfigError
from samestep.ranks import environment, stopping
from tests.recorder import name_samples


class Saboteur(L.Callback):
    """Carries out faults, each once in the life of a run, and records the steps of each attempt.

    Args:
        dirpath: where to write ``rank-<n>.jsonl``, a line per training batch, ``weights-<n>.pt``,
            the final weights, and a file for each fault that was done.
        faults: what, where, when and on which rank, such as ``kill step 13 1``.
            What: a method of this class, or one of ``store.FAULTS``. Where: step, backward,
            step_end, val, epoch_end, save, rename, load, start, test. When: the optimizer step; or
            of saves and renames, which one.
    """

    def __init__(self, dirpath: str, faults: list[str]) -> None:
        self.dirpath = Path(dirpath)
        self.dirpath.mkdir(parents=True, exist_ok=True)
        self.faults = faults
        self.attempt = time.time()
        self.num = {"save": 0, "rename": 0}

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nothing: what it keeps is of this process."""

    def meet(self, where: str, when: int, batch: Any = None) -> None:
        """Do the faults that are due here and now."""
        for fault in self.faults:
            what, place, moment, rank = fault.split()
            is_due = (place, int(moment), int(rank)) == (where, when, environment.rank())
            note = self.note_of(fault)
            if not is_due or note.exists():
                continue
            # Before the fault, which may end this process: the next one must not repeat it.
            note.write_text(json.dumps(time.time()))
            if what in store.FAULTS:
                store.begin(self.dirpath, what)
            else:
                getattr(self, what)(batch)

    def num_done(self) -> int:
        """How many of the faults have been done, by any attempt."""
        return sum(self.note_of(fault).exists() for fault in self.faults)

    def note_of(self, fault: str) -> Path:
        """The file that says that a fault was done."""
        return self.dirpath / fault.replace(" ", "-")

    def term(self, batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def term_twice(self, batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    def term_agent(self, batch: Any) -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        # Until the agent has passed it on: in the meantime a fast run could take all of its steps.
        until(lambda: stopping._State.signum)

    def term_pod(self, batch: Any) -> None:
        """What the kubelet does to a pod that is evicted."""
        assert b"samestep.launch.entrypoint" in Path("/proc/1/cmdline").read_bytes()
        os.kill(1, signal.SIGTERM)

    def term_group(self, batch: Any) -> None:
        """What an agent does, which signals loader processes too. They know who sends it."""
        command = ["kill", "-TERM", "--", f"-{os.getpgid(0)}"]
        subprocess.run(command, start_new_session=True, check=True)

    def int_agent(self, batch: Any) -> None:
        os.kill(os.getppid(), signal.SIGINT)

    def interrupt(self, batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def kill(self, batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_agent(self, batch: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    def hang(self, batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self, batch: Any) -> None:
        time.sleep(10_000)

    def sleep_then_term(self, batch: Any) -> None:
        """Wait for images that never come, while an eviction begins."""
        pid = os.getppid() if environment.under_torchrun() else os.getpid()
        os.system(f"(sleep 2; kill -TERM {pid}) &")
        time.sleep(10_000)

    def error(self, batch: Any) -> None:
        raise RuntimeError("planted error")

    def reject(self, batch: Any) -> None:
        raise ConfigError("planted rejection")

    def exit(self, batch: Any) -> None:
        os._exit(3)

    def nan(self, batch: Any) -> None:
        """Give the net nan for this batch: the images themselves are bytes, which have none."""

        def spoil(net: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            hook.remove()
            return tuple(images * torch.nan for images in inputs)

        hook = self.module.net.register_forward_pre_hook(spoil)

    def lose_etcd(self, batch: Any) -> None:
        """What happens when the pod of etcd is deleted: a new one comes, which is empty."""
        etcd_server.lose(self.dirpath, away_s=3)

    def lose_etcd_for_a_minute(self, batch: Any) -> None:
        etcd_server.lose(self.dirpath, away_s=60)

    def lose_etcd_until_told(self, batch: Any) -> None:
        etcd_server.lose(self.dirpath, away_s=math.inf)

    def setup(self, trainer, pl_module, stage) -> None:
        if stage != "fit":
            return
        self.module = pl_module
        self._wrap(os, "fsync", "save")
        self._wrap(Path, "replace", "rename")
        read = loader._Slices.read

        def reading(*args: Any) -> Any:
            if trainer.training:
                self.meet("load", trainer.global_step)
            return read(*args)

        loader._Slices.read = reading
        self.meet("start", 0)

    def _wrap(self, owner: Any, name: str, where: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            self.num[where] += 1
            self.meet(where, self.num[where])
            return function(*args)

        setattr(owner, name, wrapped)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        line = {
            "attempt": self.attempt, "step": trainer.global_step, "batch": batch_idx,
            "time": time.time(), "ids": name_samples(batch), "epoch": trainer.current_epoch,
            "world_size": trainer.world_size,
        }  # fmt: skip
        with (self.dirpath / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.meet("step", trainer.global_step, batch)

    def on_after_backward(self, trainer, pl_module) -> None:
        self.meet("backward", trainer.global_step)

    def on_train_batch_end(self, trainer, *_) -> None:
        self.meet("step_end", trainer.global_step)

    def on_validation_batch_start(self, trainer, *_) -> None:
        self.meet("val", trainer.global_step)

    def on_train_epoch_end(self, trainer, *_) -> None:
        self.meet("epoch_end", trainer.global_step)

    def on_test_batch_start(self, trainer, *_) -> None:
        self.meet("test", trainer.global_step)

    def on_fit_end(self, trainer, pl_module) -> None:
        """Write the weights as a checkpoint has them: moving averages, where the run takes some.

        In a model that had nothing left to learn Lightning does not put them.
        """
        weights = trainer._checkpoint_connector.dump_checkpoint()["state_dict"]
        # A sharded model: the shard of this rank.
        weights = {k: getattr(v, "_local_tensor", v) for k, v in weights.items()}
        torch.save(weights, self.dirpath / f"weights-{trainer.global_rank}.pt")


class WaitsForSaves(L.Callback):
    """Lets no step end before the save is written, so that the next step begins with it."""

    def on_train_batch_start(self, trainer, *_) -> None:
        trainer.strategy.checkpoint_io.wait()


class Slow(L.Callback):
    """Makes each step take at least ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_) -> None:
        time.sleep(self.seconds)


class SlowUntil(Slow):
    """Makes each step take at least ``seconds``, until a file exists: the end need not be slow."""

    def __init__(self, seconds: float, path: str) -> None:
        super().__init__(seconds)
        self.path = Path(path)

    def on_train_batch_start(self, *_) -> None:
        if not self.path.exists():
            time.sleep(self.seconds)


class SlowToTheEnd(SlowUntil):
    """Ends the run after the epoch in which the file comes to be; then one rank trains."""

    def on_train_epoch_end(self, trainer, *_) -> None:
        trainer.should_stop = trainer.should_stop or self.path.exists()


class SlowOnceHarmed(Slow):
    """Is slow in an attempt that a ``Saboteur`` harms, from its first fault on."""

    def setup(self, trainer, pl_module, stage) -> None:
        (self.saboteur,) = (c for c in trainer.callbacks if isinstance(c, Saboteur))
        if self.saboteur.num_done() == len(self.saboteur.faults):
            self.seconds = 0  # the attempts after it need not be slow

    def on_train_batch_start(self, *_) -> None:
        if self.seconds and self.saboteur.num_done():
            time.sleep(self.seconds)
