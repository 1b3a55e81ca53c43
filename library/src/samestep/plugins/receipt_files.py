"""What each batch of a run has left, so that a run that repeats batches can compare them.

``receipts.bin`` is a line of JSON, the facts under which its receipts hold, and then receipts of
``SIZE`` bytes each, in the order in which the batches were trained on. Imports no torch.

Rank zero begins a new file at each start, with the receipts that earlier processes left behind the
checkpoint, and appends to it. Nothing depends on the file: one that is damaged, cut or lost is
compared as far as it can be read, and one that cannot be written ends no run.
"""

import json
import logging
import math
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from samestep.run.files import partial_of, read_bytes

log = logging.getLogger(__name__)

FILE = "receipts.bin"
FORMAT = 1
CONTENT = struct.Struct("<III??dd")
CHECKSUM = struct.Struct("<I")
SIZE = CONTENT.size + CHECKSUM.size
VALIDATION = 2**31
"""Added to the number of batches trained on before a validation, of which only the samples of the
first batch are kept."""
MAX_BYTES = 2**22  # of a file, beside what was trained on since the last but one checkpoint

GROWTH = 2.0  # how much a rounding error grows from one batch to the next
MAX_TOLERANCE = 0.05  # where rounding could be as large, a comparison says nothing any more
Place = tuple[int, int]
Content = tuple[int, int, int, float | None, float | None]
"""The fields of a ``Receipt``."""
# What `run.json` says of repeated batches.
EQUAL, ROUNDED, DIFFERENT = "equal", "equal within rounding", "different"
NOT_COMPARED = "not compared"


class Receipt(NamedTuple):
    """What a batch that was trained on leaves, on rank zero."""

    epoch: int
    batch: int
    """Number of the batch in its epoch, from 0. A step may have several, and a batch several steps:
    only the batch is the same in every process, whatever accumulates gradients."""
    samples: int
    """Digest of the batch as it was read; 0 if unknown."""
    loss: float | None
    """The sum of the losses whose gradients were computed; None if unknown."""
    gradient: float | None
    """The sum of all gradients with which steps were taken, over all ranks; None if unknown."""

    @property
    def is_of_validation(self) -> bool:
        """Whether it is of a validation, and not of a batch that was trained on."""
        return self.batch >= VALIDATION

    @property
    def place(self) -> Place:
        """What identifies the batch in a run, or how many were trained on before a validation."""
        return self.epoch, self.batch % VALIDATION


class Facts(NamedTuple):
    """Under which facts receipts were made.

    run: configuration, ranks, precision: with another value the steps of a run may be others.
    machine: processor, threads, torch: with another value numbers are rounded differently.
    code: checksums of the user's files. Each process imports its own selection of them.
    """

    run: Mapping[str, Any]
    machine: Mapping[str, Any]
    code: Mapping[str, int]

    def find_change(self, before: "Facts") -> str:
        """What keeps receipts from being comparable; empty if nothing does."""
        for name in self.run:
            if self.run[name] != before.run.get(name):
                return f"another {name}"
        return ""

    def find_changed_code(self, before: "Facts") -> list[str]:
        """The paths of the user's files that have changed."""
        return sorted(
            n for n, checksum in self.code.items() if before.code.get(n, checksum) != checksum
        )


class Journal:
    """The file of one attempt, to which receipts are appended.

    Args:
        path: of the file, which is replaced.
        facts: of this attempt.
        earlier: receipts to keep: those of earlier attempts, of batches that are yet to come.
    """

    def __init__(self, path: Path, facts: Facts, earlier: Iterable[Receipt]) -> None:
        self.path = path
        self._head = json.dumps({"format": FORMAT, **facts._asdict()}).encode() + b"\n"
        self._waiting: list[Content] = []
        self._file = -1  # closed
        # Where the receipts of after the last checkpoint begin, and those of after the one before.
        self._saved = self._saved_before = len(self._head)
        self._begin(b"".join(map(encode, earlier)))

    def append(self, receipt: Content) -> None:
        """Add a receipt, which waits for ``flush``."""
        self._waiting.append(receipt)

    def flush(self) -> None:
        """Write what waits. The kernel has it then, and keeps it if this process is killed."""
        content = b"".join(map(encode, self._waiting))
        self._waiting.clear()
        if self._file < 0 or not content:
            return
        try:
            # Without fsync: a lost machine may lose the newest receipts, which are compared only.
            num_written = os.write(self._file, content)
        except OSError as error:
            self._give_up(error)
            return
        # Later receipts would follow half of one, where no reader would find them.
        if num_written < len(content):
            self.close()

    def checkpoint_saved(self) -> None:
        """Note that a checkpoint is saved now, and shorten a file that has grown long."""
        self.flush()
        if self._file < 0:
            return
        try:
            size = os.fstat(self._file).st_size
            # A damaged checkpoint is replaced by the one before, and no run repeats more.
            if size > MAX_BYTES:
                content = self.path.read_bytes()[self._saved_before :]
                self.close()
                size -= self._saved_before - len(self._head)
                self._saved = len(self._head) + self._saved - self._saved_before
                self._begin(content)
        except OSError as error:
            self._give_up(error)
            return
        self._saved_before, self._saved = self._saved, size

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self, content: bytes) -> None:
        partial = partial_of(self.path)
        try:
            partial.write_bytes(self._head + content)
            partial.replace(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # Not a warning: on a full disk the next checkpoint fails, with a better message.
        log.info("%s cannot be written: %s", self.path, error.strerror)
        self.close()


class Comparison:
    """Compares batches that are trained on again with what they left before.

    Bits are compared. Where numbers may be rounded differently, the first loss that differs may do
    so by ``tolerance``, and each later one by ``GROWTH`` times as much, because training makes
    differences of weights grow. When that exceeds ``MAX_TOLERANCE``, the comparison is over.

    Args:
        earlier: the receipts of the batches that may be trained on again.
        tolerance: relative, of a loss; 0 if bits must be equal.
    """

    def __init__(self, earlier: Iterable[Receipt], tolerance: float) -> None:
        # Of several attempts the newest counts: it stands last.
        self.left = {receipt.place: receipt for receipt in earlier}
        self.num_batches = 0
        self.first_step = 0
        self.largest = 0.0
        """The largest relative difference of a loss that is explained by rounding."""
        self.note = ""
        """What differs, and where; empty if nothing does."""
        self._tolerance = min(tolerance, MAX_TOLERANCE)
        self._has_rounded = False
        # A loss may be a small difference of large terms, whose rounding errors are larger.
        self._typical = mean_size(receipt.loss for receipt in self.left.values())

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compare."""
        return not self.left

    def compare(self, now: Receipt, step: int) -> None:
        """Compare a batch with what it left before, if it did; ``note`` says what differs.

        Args:
            now: what the batch has left this time.
            step: the number of its optimizer step, from 1.
        """
        before = self.left.pop(now.place, None)
        if before is None:
            return
        self.num_batches += 1
        self.first_step = self.first_step or step
        difference = self._find_difference(before, now)
        if difference:
            self.note = f"step {step} is repeated {difference}"
            # What follows the first difference differs because of it.
            self.left.clear()

    def result(self) -> dict[str, Any]:
        """For ``run.json``: how many batches were compared, and what was found."""
        result = EQUAL
        if self._has_rounded:
            result = ROUNDED
        if self.note:
            result = DIFFERENT
        return {
            "step": self.first_step,
            "batches": self.num_batches,
            "result": result,
            "largest": self.largest,
            "note": self.note,
        }

    def _find_difference(self, before: Receipt, now: Receipt) -> str:
        """What differs beyond rounding; empty if nothing does."""
        has_other_samples = have_other_samples(before, now)
        if before.loss is None or now.loss is None:
            # Only the samples can tell.
            return OTHER_SAMPLES if has_other_samples else ""
        # Memory that no sample fills, as in padded batches, may hold other bytes each time: where
        # loss and gradient are the same, so is all that matters of a batch.
        is_equal = is_same(before.loss, now.loss) and is_same(before.gradient, now.gradient)
        if not is_equal and has_other_samples:
            return OTHER_SAMPLES
        if is_equal or self._is_rounding(before.loss, now.loss):
            self._grow()
            return ""
        what = compare_numbers(before.loss, now.loss)
        # They are unknown if a GPU made them.
        if before.samples == now.samples != 0:
            what = f"on the same samples {what}"
        return f"{what}: {LOST}"

    def _is_rounding(self, before: float, now: float) -> bool:
        """Whether rounding explains this difference of a loss.

        That of a gradient is not judged: terms of a sum cancel. The next loss tells.
        """
        if not self._tolerance:
            return False
        self._has_rounded = True
        scale = max(abs(before), abs(now), self._typical)
        relative = abs(now - before) / scale if scale else 0.0
        # False for nan.
        if not relative <= self._tolerance:
            return False
        self.largest = max(self.largest, relative)
        return True

    def _grow(self) -> None:
        """Allow for larger differences in the next batch, if the weights differ from here on."""
        if self._has_rounded:
            self._tolerance *= GROWTH
        if self._tolerance > MAX_TOLERANCE:
            self.left.clear()


LOST = "something that training changes is not in the checkpoint"
OTHER_SAMPLES = (
    "with other samples, or other random transforms of them: something that the training data "
    "depend on is not in the checkpoint"
)


def mean_size(losses: Iterable[float | None]) -> float:
    """The mean of their absolute values, where they are known and finite; 0 if none is."""
    sizes = []
    for loss in losses:
        if loss is not None and math.isfinite(loss):
            sizes.append(abs(loss))
    return math.fsum(sizes) / max(1, len(sizes))


def is_same(before: float | None, now: float | None) -> bool:
    """Whether two numbers are the same; nan is the same as nan, and the unknown as anything."""
    if before is None or now is None or before == now:
        return True
    return math.isnan(before) and math.isnan(now)


def have_other_samples(before: Receipt, now: Receipt) -> bool:
    """Whether two batches have other samples, as far as both are known."""
    if not before.samples or not now.samples:
        return False
    return before.samples != now.samples


def compare_numbers(before: float, now: float) -> str:
    """A clause on the losses of two steps; without a difference it is the gradient that differs."""
    if is_same(before, now):
        return "with the same loss and another gradient"
    old, new = show_both(before, now)
    return f"with another loss, {new} instead of {old}"


def show_both(before: float, now: float) -> tuple[str, str]:
    """Two numbers, as long as it takes to see that they differ."""
    for length in (4, 9, 17):
        texts = f"{before:.{length}g}", f"{now:.{length}g}"
        if texts[0] != texts[1]:
            break
    return texts


def encode(receipt: Content) -> bytes:
    """The bytes of a receipt."""
    epoch, batch, samples, loss, gradient = receipt
    # Not nan for what is unknown: a loss can be nan.
    known = loss is not None, gradient is not None
    content = CONTENT.pack(epoch, batch, samples, *known, loss or 0.0, gradient or 0.0)
    return content + CHECKSUM.pack(zlib.crc32(content))


def decode(content: bytes) -> list[Receipt]:
    """The receipts up to the first one that is cut or damaged."""
    found = []
    for start in range(0, len(content) - SIZE + 1, SIZE):
        own = content[start : start + CONTENT.size]
        (checksum,) = CHECKSUM.unpack_from(content, start + CONTENT.size)
        if zlib.crc32(own) != checksum:
            log.info("%s is damaged after %d bytes; the rest is not compared", FILE, start)
            break
        epoch, batch, samples, knows_loss, knows_gradient, loss, gradient = CONTENT.unpack(own)
        receipt = Receipt(epoch, batch, samples, loss, gradient)
        if not knows_loss:
            receipt = receipt._replace(loss=None)
        if not knows_gradient:
            receipt = receipt._replace(gradient=None)
        found.append(receipt)
    return found


def read(path: Path) -> tuple[Facts, list[Receipt]] | None:
    """The facts and the receipts in a file; None if there is no file, or another format."""
    content = read_bytes(path)
    if content is None:
        return None
    head, _, rest = content.partition(b"\n")
    try:
        values = json.loads(head)
        if values.pop("format") != FORMAT:
            return None
        facts = Facts(**values)
        facts.find_change(facts)
    except (ValueError, TypeError, KeyError, AttributeError):
        log.info("%s is damaged; nothing is compared", path)
        return None
    return facts, decode(rest)


def code_checksums() -> dict[str, int]:
    """A checksum of each file of the user that this process has imported, by its path.

    Files of the user are in the working directory or beside the script.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or "."
    places = f"{Path.cwd()}/", f"{Path(script).absolute().parent}/"
    installed = sys.prefix, sys.base_prefix
    checksums = {}
    for module in [*sys.modules.values()]:
        # Not getattr: some libraries import what is asked of their modules.
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        # A virtual environment may be in the working directory.
        if not file.startswith(places) or file.startswith(installed):
            continue
        content = read_bytes(Path(file))
        if content is not None:
            checksums[os.path.relpath(file)] = zlib.crc32(content)
    return checksums
