"""The first difference between two runs, and how large it is. Imports no torch.

An interrupted run must equal the undisturbed one to the last bit. Several ranks add the same
numbers in another order than one rank, so their weights may differ by rounding: see ``Tolerance``.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep.run.metrics import is_result, read_final_metrics, read_history
from samestep.verify import records
from samestep.verify.records import Batch, Place, Rank, State, Summaries, Summary

MEASURED = re.compile(r"time/.*|system/.*|.*_per_second|DeviceStatsMonitor.*")
"""Columns of metrics.csv that no two runs have alike."""
PARAMETERS = ("parameter",)
WEIGHTS = ("parameter", "buffer")
"""Kinds of what a model ends with."""


class Difference(NamedTuple):
    """Where two runs differ first."""

    kind: str
    """``samples``, ``loss``, ``setting`` (of an optimizer), ``parameter``, ``optimizer-state``,
    ``buffer``, ``unsaved-buffer``, ``metric``, ``row``, ``length`` (other batches), ``ranks`` (of
    one run) or ``slice``."""
    text: str
    step: int | None = None
    amount: float | None = None

    @property
    def is_inexcusable(self) -> bool:
        """Whether no note can explain it: a batch was cut wrongly, or the ranks have diverged."""
        return self.kind in ("ranks", "slice")


class Tolerance(NamedTuple):
    """How much two runs may differ by rounding, in parts of the largest value of a tensor.

    With 64 bits a number is rounded by 1e-16. A gradient is a sum over thousands of samples and
    products, which another order of addition changes by some 1e-14, and each step of training
    multiplies what the steps before have left: ordinary models end below 1e-11 after 40 steps,
    LBFGS comes to 5e-9 after 20 and to 1e-6 after 27. A wrong weight of a sample changes the first
    step that has it by 1e-6 and more. So ``FLOAT64`` begins at 1e-12, and grows with the steps up
    to 1e-5. With 32 bits rounding reaches 1e-4 itself, with 16 bits 1e-2, so only larger errors can
    be told from it.
    """

    relative: float
    absolute: float
    growth: float = 1.0
    """In each step."""
    limit: float = 1.0
    """Up to which it grows."""

    def after(self, num_steps: int) -> "Tolerance":
        """The tolerance after so many steps."""
        factor = min(self.growth**num_steps, self.limit / self.relative)
        return self._replace(relative=self.relative * factor, absolute=self.absolute * factor)

    def allows(self, difference: float, scale: float) -> bool:
        """Whether values of this size may differ so much; two that are not finite may not."""
        return difference <= self.absolute + self.relative * scale

    def is_near(self, value: float | None, expected: float | None) -> bool:
        """Whether two numbers, of which one may be missing, differ by rounding only."""
        if value is None or expected is None or are_equal(value, expected):
            return are_equal(value, expected)
        return self.allows(distance(value, expected), abs(expected))


EXACT = Tolerance(0.0, 0.0)
FLOAT64 = Tolerance(1e-12, 1e-13, growth=1.6, limit=1e-5)
FLOAT32 = Tolerance(1e-3, 1e-5)
FLOAT16 = Tolerance(5e-2, 5e-3)
TOLERANCES = {"64-true": FLOAT64, "32-true": FLOAT32}
"""By the precision of a run; 16 bits have the other one."""


def number(value: float) -> str:
    """A difference, as it is printed."""
    return f"{value:.2g}"


def place_of(step: int, place: Place) -> str:
    """Where it was, as it is printed."""
    return f"from step {step + 1} (epoch {place[0]}, batch {place[1]})"


# -- Interrupted and undisturbed -------------------------------------------------------------------


def first_difference(
    ours: Sequence[Rank], theirs: Sequence[Rank], run_dir: Path, other_dir: Path
) -> Difference | None:
    """Where a run differs first from another one with the same ranks; None if nowhere.

    Args:
        ours: what its ranks have recorded.
        theirs: what those of the other run have recorded.
        run_dir: of the run.
        other_dir: of the other run.
    """
    if len(ours) != len(theirs):
        return Difference("length", f"{len(ours)} ranks have trained, and not {len(theirs)}")
    found = []
    for rank, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        difference = difference_of_batches(own, other)
        if difference is not None and len(ours) > 1:
            difference = difference._replace(text=f"{difference.text}, on rank {rank}")
        if difference is not None:
            found.append(difference)
    if found:
        return min(found, key=lambda difference: difference.step or 0)
    for own, other in zip(ours, theirs, strict=True):
        difference = difference_of_evaluations(own, other, are_equal)
        difference = difference or difference_of_final(own, other)
        if difference is not None:
            return difference
    return difference_of_files(run_dir, other_dir)


def difference_of_batches(own: Rank, other: Rank) -> Difference | None:
    """The first batch that differs, and in what."""
    for place in sorted(own.batches.keys() | other.batches.keys()):
        difference = missing_batch(own, other, place)
        difference = difference or difference_of_batch(
            own.batches[place], other.batches[place], place
        )
        if difference is not None:
            return difference
    return None


def missing_batch(own: Rank, other: Rank, place: Place) -> Difference | None:
    """Whether only one of two runs has trained on this batch."""
    if place in own.batches and place in other.batches:
        return None
    epoch, batch = place
    has = "has no" if place not in own.batches else "has an additional"
    step = (own.batches.get(place) or other.batches[place]).step
    return Difference("length", f"it {has} batch {batch} in epoch {epoch}", step)


def difference_of_batch(own: Batch, other: Batch, place: Place) -> Difference | None:
    """In what two runs differ at one batch: the cause comes before what follows from it."""
    where = place_of(own.step, place)
    if own.step != other.step:
        text = f"{where}: it has made {own.step} optimizer steps before, and not {other.step}"
        return Difference("length", text, own.step)
    if own.rows != other.rows:
        return Difference("samples", f"{where} in {count_others(own, other)}", own.step)
    if not are_equal(own.loss, other.loss):
        amount = distance(own.loss, other.loss)
        return Difference("loss", f"{where} in the loss by {number(amount)}", own.step, amount)
    if own.state == other.state:
        return None
    changed = difference_of_states(
        records.read_state(own.state or {}), records.read_state(other.state or {})
    )
    return changed and changed._replace(text=f"{where} in {changed.text}", step=own.step)


def count_others(own: Batch, other: Batch) -> str:
    """How many samples differ."""
    others = sum((Counter(own.rows) - Counter(other.rows)).values())
    if not others and len(own.rows) == len(other.rows):
        return "the order of the samples"
    rows = max(len(own.rows), len(other.rows))
    return f"the samples: {others or rows - len(other.rows)} of {rows} rows"


def difference_of_states(own: State, other: State) -> Difference | None:
    """The tensor that differs most, of the first kind that differs."""
    if own.keys() != other.keys():
        name = sorted(own.keys() ^ other.keys())[0]
        return Difference(kind_of(name), f"whether there is {name}")
    worst: dict[str, Difference] = {}
    for name in own:
        if own[name].checksum == other[name].checksum:
            continue
        amount = distance_of(own[name], other[name])
        kind = kind_of(name)
        if kind not in worst or amount > (worst[kind].amount or 0):
            worst[kind] = Difference(kind, f"{name} by {number(amount)}", amount=amount)
    # A setting such as lr changes the parameters of the same step, and these the buffers.
    for kind in ("setting", "parameter", "buffer", "unsaved-buffer", "optimizer-state"):
        if kind in worst:
            return worst[kind]
    return None


def kind_of(name: str) -> str:
    """The kind of a difference in this entry of a state."""
    return name.partition(" ")[0]


def distance_of(own: Summary, other: Summary) -> float:
    """The largest difference among the values, or where they are equal, that of the sums."""
    if len(own.values) != len(other.values):
        return math.inf
    largest = 0.0
    for value, expected in zip(own.values, other.values, strict=True):
        if not are_equal(value, expected):
            largest = max(largest, distance(value, expected))
    # The element that differs is not among the values.
    return largest or abs(own.sum - other.sum)


def distance(own: float | None, other: float | None) -> float:
    """How far two numbers are apart; infinite if one of them is missing or not finite."""
    if own is None or other is None:
        return 0.0 if own is other else math.inf
    difference = abs(own - other)
    return math.inf if math.isnan(difference) else difference


def are_equal(own: float | None, other: float | None) -> bool:
    """Whether two numbers are the same, or neither is a number."""
    if own is None or other is None:
        return own is other
    return own == other or (math.isnan(own) and math.isnan(other))


def difference_of_evaluations(
    own: Rank, other: Rank, is_same: Callable[[float | None, float | None], bool]
) -> Difference | None:
    """The first metric of a validation or test that differs."""
    for key in sorted(own.evaluations.keys() | other.evaluations.keys()):
        stage, epoch, step = key
        where = "in the test" if stage == "test" else f"in the {stage} after step {step}"
        if key not in own.evaluations or key not in other.evaluations:
            has = "has no" if key not in own.evaluations else "has an additional"
            text = f"it {has} {stage} after step {step} in epoch {epoch}"
            return Difference("metric", text, step)
        difference = difference_of_metrics(own.evaluations[key], other.evaluations[key], is_same)
        if difference is not None:
            return difference._replace(text=f"{where} {difference.text}", step=step)
    return None


def difference_of_metrics(
    own: Mapping[str, float], other: Mapping[str, float],
    is_same: Callable[[float | None, float | None], bool],
) -> Difference | None:  # fmt: skip
    """The first metric that differs."""
    for name in sorted(own.keys() | other.keys()):
        value, expected = own.get(name), other.get(name)
        if not is_same(value, expected):
            amount = distance(value, expected)
            return Difference("metric", f"in {name} by {number(amount)}", amount=amount)
    return None


def difference_of_final(own: Rank, other: Rank) -> Difference | None:
    """Whether two runs end with the same weights."""
    if own.final == other.final:
        return None
    found = difference_of_states(
        records.read_state(own.final or {}), records.read_state(other.final or {})
    )
    return found and found._replace(text=f"at the end of training in {found.text}")


def difference_of_files(run_dir: Path, other_dir: Path) -> Difference | None:
    """The first row of metrics.csv, or final metric, that differs."""
    ours, theirs = rows_of(run_dir), rows_of(other_dir)
    for step in sorted(ours.keys() | theirs.keys()):
        if step not in ours or step not in theirs:
            has = "has no" if step not in ours else "has an additional"
            return Difference("row", f"metrics.csv {has} row of step {step}", step)
        found = difference_of_metrics(ours[step], theirs[step], are_equal)
        if found is not None:
            text = f"metrics.csv, row of step {step}: {found.text}"
            return Difference("row", text, step, found.amount)
    return difference_of_results(run_dir, other_dir, EXACT)


def rows_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The rows of metrics.csv by their steps, without what is measured in seconds and bytes."""
    rows = {}
    for row in read_history(run_dir):
        kept = {name: value for name, value in row.items() if not MEASURED.fullmatch(name)}
        rows[int(row["step"])] = kept
    return rows


def finals_of(run_dir: Path) -> dict[str, float]:
    """The final metrics of a run that are about what was learned."""
    metrics = read_final_metrics(run_dir) or {}
    return {name: value for name, value in metrics.items() if is_result(name)}


# -- Ranks -----------------------------------------------------------------------------------------


def difference_of_ranks(ranks: Sequence[Rank]) -> Difference | None:
    """Whether the ranks of one run have diverged: other weights, or other metrics."""
    for number_of_rank, rank in enumerate(ranks[1:], 1):
        between = f"rank {number_of_rank} differs from rank 0"
        final = select(rank.final, WEIGHTS)
        of_zero = select(ranks[0].final, WEIGHTS)
        if final != of_zero:
            found = difference_of_states(records.read_state(final), records.read_state(of_zero))
            what = found.text if found is not None else "its weights"
            return Difference("ranks", f"{between} at the end of training in {what}")
        found = difference_of_evaluations(rank, ranks[0], are_equal)
        if found is not None:
            return Difference("ranks", f"{between} {found.text}", found.step, found.amount)
    return None


def select(state: Summaries | None, kinds: Sequence[str]) -> Summaries:
    """The entries of a state that are of these kinds."""
    return {name: value for name, value in (state or {}).items() if kind_of(name) in kinds}


def difference_of_samples(ours: Sequence[Rank], one: Rank) -> Difference | None:
    """The first step in which all ranks together see other samples than one rank."""
    places = sorted(one.batches.keys() | ours[0].batches.keys())
    for place in places:
        rows = sorted(row for rank in ours if place in rank.batches for row in rows_at(rank, place))
        expected = sorted(rows_at(one, place)) if place in one.batches else []
        if rows == expected:
            continue
        known = one.batches.get(place) or ours[0].batches[place]
        where = place_of(known.step, place)
        # A DataLoader has a batch for each rank, so a step has as many samples, or as many for each
        # rank. Any other number means that a batch was cut wrongly. The last one may be short.
        is_cut = place == places[0] and len(rows) not in (len(expected), len(ours) * len(expected))
        if is_cut:
            text = f"{where}: the ranks have {len(rows)} rows together, and one has {len(expected)}"
            return Difference("slice", text, known.step)
        others = sum((Counter(rows) - Counter(expected)).values())
        text = f"{where} in the samples: {others} of {len(rows)} rows"
        return Difference("samples", text, known.step)
    return None


def rows_at(rank: Rank, place: Place) -> list[int]:
    """The samples that a rank saw in one batch."""
    return rank.batches[place].rows


def difference_beyond(ours: Sequence[Rank], one: Rank, tolerance: Tolerance) -> Difference | None:
    """Where several ranks differ from one rank by more than rounding, with the same samples.

    The losses are not compared: each rank has that of its slice. Buffers are compared at the end
    only: each rank changes them by its own samples until their mean is taken.
    """
    for place in sorted(one.batches.keys() & ours[0].batches.keys()):
        own, other = ours[0].batches[place], one.batches[place]
        found = difference_of_weights(
            select(own.state, PARAMETERS),
            select(other.state, PARAMETERS),
            tolerance.after(other.step + 1),
        )
        if found is not None:
            where = place_of(other.step, place)
            return found._replace(text=f"{where} in {found.text}", step=other.step)
    at_end = tolerance.after(len(one.batches))
    found = difference_of_weights(
        select(ours[0].final, WEIGHTS), select(one.final, WEIGHTS), at_end
    )
    if found is not None:
        return found._replace(text=f"at the end of training in {found.text}")
    return difference_of_evaluations(ours[0], one, at_end.is_near)


def difference_of_results(
    run_dir: Path, other_dir: Path, tolerance: Tolerance
) -> Difference | None:
    """The final metric that differs by more than rounding."""
    found = difference_of_metrics(finals_of(run_dir), finals_of(other_dir), tolerance.is_near)
    return found and found._replace(text=f"metrics.json: {found.text}")


def difference_of_weights(
    own: Summaries, other: Summaries, tolerance: Tolerance
) -> Difference | None:
    """The tensor that exceeds the tolerance most."""
    ours, theirs = records.read_state(own), records.read_state(other)
    for name in sorted(ours.keys() ^ theirs.keys()):
        return Difference(kind_of(name), f"whether there is {name}")
    beyond = [*exceeding(ours, theirs, tolerance)]
    return max(beyond, key=lambda found: found.amount or 0.0, default=None)


def exceeding(ours: State, theirs: State, tolerance: Tolerance) -> Iterator[Difference]:
    """Each tensor that differs by more than rounding."""
    for name, own in ours.items():
        other = theirs[name]
        amount = distance_of(own, other)
        scale = max(map(abs, other.values), default=0.0)
        is_near = tolerance.allows(amount, scale)
        is_near &= tolerance.allows(abs(own.sum - other.sum), other.absolute_sum)
        if own.checksum != other.checksum and not is_near:
            yield Difference(kind_of(name), f"{name} by {number(amount)}", amount=amount)
