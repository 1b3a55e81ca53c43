"""Compares the steps that a continued run repeats with what they were before."""

import logging
import time
import zlib
from collections import deque
from datetime import datetime
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from samestep.callbacks.batch_digest import BatchDigest
from samestep.callbacks.checkpoints import progress_of
from samestep.callbacks.loss_guard import LossGuard
from samestep.callbacks.notes import join_names, print_note
from samestep.plugin import Plugin
from samestep.plugins import receipt_files as receipts
from samestep.plugins.provenance import packages_of
from samestep.plugins.receipt_files import Comparison, Facts, Journal, Receipt
from samestep.ranks import devices, environment, virtual
from samestep.ranks.compat import callbacks_of
from samestep.run import record
from samestep.run.files import read_bytes
from samestep.run_spec import RunSpec

log = logging.getLogger(__name__)

EVERY_S = 0.1  # seconds between two writes; a process that is killed loses what waits for one
PAUSE = 500  # times as long as a digest and a write take, until the next: 0.2 % at most
FIRST = 8  # batches behind a checkpoint that do not wait: they show most of what can differ
COPY_EVERY = 50  # batches at most, of which a GPU's losses are copied together
TOLERANCES = {"64": 1e-13, "32": 1e-5, "16": 5e-3, "bf16": 3e-2}
"""Relative, by precision: some hundred roundings of a number in the long sums of 64 and 32 bits,
and four to five where factors have 16 bits: their products are added in 32 bits, and a loss is a
mean over many samples, in which errors of single ones cancel."""
OTHER_MACHINE = 10  # times as much
EXACT_RANKS = 2  # a sum of two numbers has no order; more ranks may add theirs in any order
NOTE_ON_CODE = "Note: this code has changed since the run was interrupted: {}"
NOTE_ON_VALIDATION = (
    "the validation after {} batches of epoch {} is repeated with other samples, or other random "
    "transforms of them: something that the validation data depend on is not in the checkpoint"
)
VERIFY = "`samestep verify -- <command>` finds it"


is_of_validation = attrgetter("is_of_validation")


class Pending(NamedTuple):
    """A receipt, and the number of its step; its loss may still be on a GPU."""

    receipt: Receipt
    step: int


def callback(spec: RunSpec) -> L.Callback | None:
    """``Receipts`` on rank zero, which alone writes files of the run."""
    if environment.rank() != 0 or spec.saves_nothing:
        return None
    return Receipts(spec.run_dir, has_auto_shares=spec.shares == "auto")


class Receipts(Plugin):
    """Leaves a receipt of each batch, and compares those that a continued run repeats.

    After SIGKILL a run repeats the batches since its last checkpoint. If a loss or gradient is not
    what it was, something that training depends on is in no checkpoint: one note says at which
    step, and what differs. ``run.json`` keeps the note, and what was compared without one. Nothing
    is compared if configuration, packages or ranks have changed; changed code is said, and what it
    computes is compared all the same. Losses are compared only within
    rounding (see ``Comparison``) if the machine has, or if it does not give the same bits twice.

    Only rank zero has this callback; its losses are those
    of its slices, its samples those that it has read, and its gradients those of all ranks. No step
    waits for a GPU: its losses are compared some steps later.

    Args:
        run_dir: the directory of the run.
        has_auto_shares: whether ranks are measured, after which they may get other slices.
    """

    def __init__(self, run_dir: Path, *, has_auto_shares: bool = False) -> None:
        self.run_dir = run_dir
        self.has_auto_shares = has_auto_shares
        self._journal: Journal | None = None
        self._comparison: Comparison | None = None
        self._on_device = LossesOnDevice()
        self._validated: dict[receipts.Place, int] = {}  # the samples of validations, repeated now
        self._is_training = False
        self._num_first = FIRST
        self._next_due = 0.0
        # Of the batch that is trained on:
        self._place: receipts.Place | None = None
        self._is_due = False
        self._samples = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a new file with the next batch."""
        self._close()
        # It knows the losses and gradients.
        self._guard, *_ = callbacks_of(trainer, LossGuard)
        self._guard.has_receipts = True
        self._is_training = True

    def on_batch_read(self, trainer: L.Trainer, batch_idx: int, batch: Any) -> None:
        """Note which batch comes next; the one before is over."""
        # Lightning's tuner trains before training begins, without any callback.
        if not self._is_training:
            return
        place = trainer.current_epoch, batch_idx
        if self._journal is None:
            # Not in `on_train_start`: only here the place is certain, after every kind of restart.
            self._begin(trainer, place)
        # Not in `on_train_batch_end`: another hook in each step would cost as much as all of this.
        self._end_batch(trainer)
        self._place = place
        # Fast steps leave most digests out: they only tell what has caused another loss.
        self._is_due = self._num_first > 0 or time.perf_counter() >= self._next_due
        if self._is_due or self._comparison is not None:
            start = time.perf_counter()
            self._samples = BatchDigest(batch).checksum
            self._pause_since(start)

    def _end_batch(self, trainer: L.Trainer) -> None:
        """Write the receipt of the batch that was trained on, and compare it."""
        place = self._place
        if place is None or self._journal is None:
            return
        loss = self._guard.take_loss()
        gradient = self._guard.take_sum_of_gradients()
        if isinstance(loss, Tensor) and not devices.is_on_gpu(loss):
            # Other devices have no way to ask for it later.
            loss = None
        if isinstance(loss, Tensor):
            receipt = Receipt(*place, self._samples, None, gradient)
            self._on_device.add(Pending(receipt, trainer.global_step), loss)
            self._keep_arrived(trainer, self._on_device.take_arrived())
        else:
            # A plain tuple is made faster than a Receipt.
            content = (*place, self._samples, loss, gradient)
            self._journal.append(content)
            if self._comparison is not None:
                self._compare(trainer, Receipt(*content), trainer.global_step)
        self._place = None
        self._samples = 0
        if self._is_due:
            self._num_first -= 1
            start = time.perf_counter()
            self._journal.flush()
            # On a disk that is far away a write may take as long as a step.
            self._pause_since(start)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Compare the first batch of a validation that is repeated; not one that is on a GPU."""
        if batch_idx or dataloader_idx or not self._is_training:
            return
        loop: Any = trainer.fit_loop
        place = trainer.current_epoch, loop.num_trained_batches()
        if self._journal is None:
            self._begin(trainer, place)
        assert self._journal is not None
        samples = BatchDigest(batch).checksum
        self._journal.append((place[0], receipts.VALIDATION + place[1], samples, None, None))
        self._journal.flush()
        if samples not in (0, self._validated.pop(place, samples)):
            note = NOTE_ON_VALIDATION.format(place[1], place[0])
            print_note(trainer, f"Note: {note}. {VERIFY}")
            self._record({"result": receipts.DIFFERENT, "note": note})

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Tell the file that older receipts are no longer needed."""
        # The batch before is not ended: a user's callback may save in the middle of one.
        if self._journal is not None:
            self._journal.checkpoint_saved()
        self._num_first = FIRST

    def on_step_rehearsed(self, trainer: L.Trainer) -> None:
        """Compare it, and write its receipt."""
        self.on_train_end(trainer, trainer.lightning_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare what is still on the device, and close the file."""
        self._end_batch(trainer)
        self._keep_arrived(trainer, self._on_device.take_all())
        if self._comparison is not None:
            self._end_comparison(trainer)
        self._close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close the file. The device is not asked: it may be what has failed."""
        self._close()

    def _begin(self, trainer: L.Trainer, place: receipts.Place) -> None:
        """Find the receipts of the batches that are repeated, and begin the file of this start."""
        path = self.run_dir / receipts.FILE
        facts = facts_of(trainer, self.run_dir)
        found = receipts.read(path)
        kept: list[Receipt] = []
        noted = trainer.fit_loop.resume.note  # type: ignore[attr-defined]
        if noted:
            self._record({"result": receipts.DIFFERENT, "note": noted})
        # Without a checkpoint the run starts over, and may do so with other weights.
        if found is not None and trainer.ckpt_path is not None:
            before, known = found
            repeated = self._choose_repeated(known, place)
            changed = facts.find_changed_code(before)
            if changed:
                print_note(trainer, NOTE_ON_CODE.format(join_names(changed)))
            has_same_machine = facts.machine == before.machine
            change = facts.find_change(before)
            if repeated and change:
                self._record({"result": receipts.NOT_COMPARED, "note": change})
            elif repeated:
                validations = filter(is_of_validation, repeated)
                self._validated = {receipt.place: receipt.samples for receipt in validations}
                steps = filterfalse(is_of_validation, repeated)
                # All that follows a batch that differs does so because of it.
                if not noted:
                    self._comparison = Comparison(steps, tolerance_of(trainer, has_same_machine))
                # For a later process those of another machine would be receipts of this one.
                kept = repeated if has_same_machine else []
        self._journal = Journal(path, facts, kept)

    def _choose_repeated(self, known: list[Receipt], place: receipts.Place) -> list[Receipt]:
        """The receipts of the batches that may be repeated, when the run continues at a place."""
        repeated = []
        for receipt in known:
            # Ranks are measured after each epoch, so in a later one they may have other slices.
            is_comparable = receipt.epoch == place[0] or not self.has_auto_shares
            if receipt.place >= place and is_comparable:
                repeated.append(receipt)
        return repeated

    def _pause_since(self, start: float) -> None:
        """Let what has begun then, and ends now, take a small part of the time only."""
        end = time.perf_counter()
        self._next_due = end + max(EVERY_S, PAUSE * (end - start))

    def _keep_arrived(self, trainer: L.Trainer, arrived: list[Pending]) -> None:
        """Write and compare receipts whose losses have come from the device."""
        for receipt, step in arrived:
            if self._journal is not None:
                self._journal.append(receipt)
            self._compare(trainer, receipt, step)

    def _compare(self, trainer: L.Trainer, receipt: Receipt, step: int) -> None:
        """Compare a batch with what it left before, if that is known."""
        if self._comparison is None:
            return
        self._comparison.compare(receipt, step)
        if self._comparison.is_over:
            self._end_comparison(trainer)

    def _end_comparison(self, trainer: L.Trainer) -> None:
        """Record what was compared, and say what differs."""
        assert self._comparison is not None
        result = self._comparison.result()
        if self._comparison.note:
            print_note(trainer, f"Note: {self._comparison.note}. {VERIFY}")
        if self._comparison.num_batches:
            self._record(result)
        self._comparison = None

    def _record(self, result: dict[str, Any]) -> None:
        """Add what was found to ``run.json``."""
        time = datetime.now().astimezone().isoformat(timespec="seconds")
        repeats = [*record.read(self.run_dir).repeats, {"time": time, **result}]
        record.try_to_update(self.run_dir, record.RUNNING, repeats=repeats)

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.flush()
            self._journal.close()
        self._is_training = False
        self._journal = self._comparison = self._place = None
        self._validated = {}
        self._on_device = LossesOnDevice()


class LossesOnDevice:
    """Brings losses from a GPU to this process, which never waits for them.

    Several are copied at once, unless steps are so long that it makes no difference.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Pending, Tensor]] = []
        self._copies: deque[tuple[list[Pending], devices.Copy]] = deque()
        self._last_copy = time.perf_counter()

    def add(self, pending: Pending, loss: Tensor) -> None:
        """Add a receipt without its loss, which is on the device."""
        self._waiting.append((pending, loss))
        is_late = time.perf_counter() - self._last_copy >= EVERY_S
        if is_late or len(self._waiting) >= COPY_EVERY:
            self._start_copy()

    def take_arrived(self) -> list[Pending]:
        """The receipts whose losses have arrived, with them."""
        arrived: list[Pending] = []
        while self._copies and self._copies[0][1].event.query():
            arrived += complete(*self._copies.popleft())
        return arrived

    def take_all(self) -> list[Pending]:
        """All receipts; this waits for the device."""
        if self._waiting:
            self._start_copy()
        arrived: list[Pending] = []
        while self._copies:
            self._copies[0][1].event.synchronize()
            arrived += complete(*self._copies.popleft())
        return arrived

    def _start_copy(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._last_copy = time.perf_counter()
        copy = devices.start_copy([loss for _, loss in waiting])
        self._copies.append(([pending for pending, _ in waiting], copy))


def complete(waiting: list[Pending], copy: devices.Copy) -> list[Pending]:
    """The receipts whose losses have arrived, with them, in their order."""
    completed = []
    for (receipt, step), loss in zip(waiting, copy.values.tolist(), strict=True):
        completed.append(Pending(receipt._replace(loss=loss), step))
    return completed


def facts_of(trainer: L.Trainer, run_dir: Path) -> Facts:
    """The facts on which the steps of this process depend, beside its checkpoint."""
    known = record.read(run_dir)
    device = trainer.strategy.root_device
    packages = json_checksum(packages_of(known))
    run = {
        "configuration": zlib.crc32(read_bytes(run_dir / "config.yaml") or b""),
        "number of ranks": virtual.layout().total,
        "accelerator": device.type,
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "division of batches": progress_of(trainer).get("shares"),
        "set of packages": packages,
    }
    machine = {
        "cpu": known.start.get("cpu"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
    return Facts(run, machine, receipts.code_checksums())


def json_checksum(texts: dict[str, str]) -> int:
    """A checksum of names and values, whatever their order."""
    return zlib.crc32(repr(sorted(texts.items())).encode())


def tolerance_of(trainer: L.Trainer, has_same_machine: bool) -> float:
    """The relative difference that rounding may make in a loss; 0 where bits must be equal."""
    if has_same_machine and gives_equal_bits(trainer):
        return 0.0
    tolerance = TOLERANCES[kind_of_rounding(trainer)]
    # Another order of additions is one thing, other kernels with other products another.
    return tolerance if has_same_machine else OTHER_MACHINE * tolerance


def gives_equal_bits(trainer: L.Trainer) -> bool:
    """Whether this machine computes the same step twice."""
    is_deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    kind = trainer.strategy.root_device.type
    if kind not in ("cpu", "cuda"):
        # Whether torch's switch covers all operations is not known of other devices.
        return False
    if kind == "cuda":
        # cuDNN's benchmark times several kernels, and may choose others in each process.
        return is_deterministic and not torch.backends.cudnn.benchmark
    # Threads add in any order where an index occurs twice, as in the gradient of `x[index]`.
    is_ordered = virtual.layout().is_virtual or trainer.world_size <= EXACT_RANKS
    return is_deterministic or (is_ordered and torch.get_num_threads() == 1)


def kind_of_rounding(trainer: L.Trainer) -> str:
    """The key in ``TOLERANCES``."""
    precision = str(trainer.precision)
    if precision.startswith("64"):
        return "64"
    if "bf16" in precision:
        return "bf16"
    # Convolutions of 32 bits on a GPU multiply as TF32 by default, with the fraction of 16 bits.
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    if "16" in precision or not is_on_cpu:
        return "16"
    return "32"
