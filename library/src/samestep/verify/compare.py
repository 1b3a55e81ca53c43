"""The first difference between two runs, and how large it is. Imports no torch.

An interrupted run must equal the undisturbed one to the last bit. Several ranks add the same
numbers in another order than one rank, so their weights may differ by rounding: see ``Tolerance``.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep.run.metrics import is_result, read_final_metrics, read_history
from samestep.verify import records
from samestep.verify.records import Batch, Place, Rank, Summaries, Summary

MEASURED = re.compile(r"time/.*|system/.*|.*_per_second|DeviceStatsMonitor.*")
"""Columns of metrics.csv that no two runs have alike."""
PARAMETERS = ("parameter",)
WEIGHTS = ("parameter", "buffer")
"""Kinds of what a model ends with."""
# A setting such as lr changes the parameters of the same step, and these the buffers.
CAUSES = ("setting", "parameter", "buffer", "unsaved-buffer", "optimizer-state")
"""Kinds of what an optimizer step changes: the cause before what follows from it."""

IsSame = Callable[[float | None, float | None], bool]


class Difference(NamedTuple):
    """Where two runs differ first."""

    kind: str
    """``samples``, ``loss``, ``setting`` (of an optimizer), ``parameter``, ``optimizer-state``,
    ``buffer``, ``unsaved-buffer``, ``metric``, ``row``, ``length`` (other batches), ``ranks`` (of
    one run) or ``slice``."""
    text: str
    step: int | None = None
    amount: float = 0.0

    def within(self, where: str, step: int | None = None) -> "Difference":
        """The same difference, and where it was found."""
        return self._replace(text=f"{where} {self.text}", step=step)

    @property
    def is_inexcusable(self) -> bool:
        """Whether no note can explain it: a batch was cut wrongly, or the ranks have diverged."""
        return self.kind in ("ranks", "slice")


NONE = Difference("", "", amount=-1.0)


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
        if are_equal(value, expected):
            return True
        # The distance to a number that is missing is infinite.
        return self.allows(distance(value, expected), abs(expected or 0.0))


EXACT = Tolerance(0.0, 0.0)
FLOAT64 = Tolerance(1e-12, 1e-13, growth=1.6, limit=1e-5)
FLOAT32 = Tolerance(1e-3, 1e-5)
FLOAT16 = Tolerance(5e-2, 5e-3)
TOLERANCES = {"64-true": FLOAT64, "32-true": FLOAT32}
"""By the precision of a run; 16 bits have the other one."""


def first_of(differences: Iterator[Difference]) -> Difference | None:
    """The first one; None if there is none."""
    # What follows is not even computed: after one difference all steps differ.
    return next(differences, None)


def place_of(step: int, place: Place) -> str:
    """Where it was, as it is printed."""
    return f"from step {step + 1} (epoch {place[0]}, batch {place[1]})"


def only_in_one(key: object, own: Collection[object], what: str) -> str:
    """What is printed where only one of two runs has something."""
    has = "has an additional" if key in own else "has no"
    return f"it {has} {what}"


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
    return first_of(all_differences(ours, theirs, run_dir, other_dir))


def all_differences(
    ours: Sequence[Rank], theirs: Sequence[Rank], run_dir: Path, other_dir: Path
) -> Iterator[Difference]:
    """The differences of two runs: first the steps, because all else follows from them."""
    pairs = list(zip(ours, theirs, strict=True))
    yield from differences_of_batches(pairs)
    for own, other in pairs:
        yield from differences_of_evaluations(own, other, are_equal)
        for found in differences_of_states(own.final, other.final):
            yield found.within("at the end of training in")
    yield from differences_of_rows(run_dir, other_dir)
    yield from differences_of_results(run_dir, other_dir, EXACT)


def differences_of_batches(pairs: Sequence[tuple[Rank, Rank]]) -> Iterator[Difference]:
    """The batches that differ, and in what, in the order in which they were trained on."""
    places = set[Place]()
    for own, other in pairs:
        places |= own.batches.keys() | other.batches.keys()
    # All ranks at one place, before the next one: the first rank that differs infects the others.
    for place in sorted(places):
        for rank, (own, other) in enumerate(pairs):
            for found in differences_at(place, own, other):
                suffix = f", on rank {rank}" if len(pairs) > 1 else ""
                yield found._replace(text=found.text + suffix)


def differences_at(place: Place, own: Rank, other: Rank) -> Iterator[Difference]:
    """In what one rank of two runs differs at one batch."""
    if place in own.batches and place in other.batches:
        yield from differences_of_batch(own.batches[place], other.batches[place], place)
        return
    known = own.batches | other.batches
    if place in known:
        text = only_in_one(place, own.batches, f"batch {place[1]} in epoch {place[0]}")
        yield Difference("length", text, known[place].step)


def differences_of_batch(own: Batch, other: Batch, place: Place) -> Iterator[Difference]:
    """In what two runs differ at one batch: the cause comes before what follows from it."""
    where = place_of(own.step, place)
    if own.step != other.step:
        text = f"{where}: it has made {own.step} optimizer steps before, and not {other.step}"
        yield Difference("length", text, own.step)
    if own.rows != other.rows:
        yield Difference("samples", count_others(own.rows, other.rows)).within(where, own.step)
    if not are_equal(own.loss, other.loss):
        amount = distance(own.loss, other.loss)
        yield Difference("loss", f"{where} in the loss by {amount:.2g}", own.step, amount)
    for found in differences_of_states(own.state, other.state):
        yield found.within(f"{where} in", own.step)


def count_others(rows: Sequence[int], expected: Sequence[int]) -> str:
    """How many samples differ, as it is printed."""
    if sorted(rows) == sorted(expected):
        return "in the order of the samples"
    # Either may have samples that the other lacks: an epoch that was cut has fewer.
    additional = (Counter(rows) - Counter(expected)).total()
    missing = (Counter(expected) - Counter(rows)).total()
    return f"in the samples: {max(additional, missing)} of {max(len(rows), len(expected))} rows"


def differences_of_states(own: Summaries | None, other: Summaries | None) -> Iterator[Difference]:
    """Of each kind the tensor that differs most, the kind that is the cause first."""
    # Most are equal, and need not be decoded.
    if own == other:
        return
    ours, theirs = records.read_state(own), records.read_state(other)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield Difference(kind_of(name), f"whether there is {name}")
    worst: dict[str, Difference] = {}
    for name in ours.keys() & theirs.keys():
        found = difference_of_tensor(name, ours[name], theirs[name])
        known = worst.get(kind_of(name), NONE)
        if found is not None and found.amount > known.amount:
            worst[found.kind] = found
    for kind in CAUSES:
        if kind in worst:
            yield worst[kind]


def difference_of_tensor(name: str, own: Summary, other: Summary) -> Difference | None:
    """How far a tensor is from what it was in another run; None if it is equal to the last bit."""
    if own.checksum == other.checksum:
        return None
    amount = distance_of(own, other)
    return Difference(kind_of(name), f"{name} by {amount:.2g}", amount=amount)


def kind_of(name: str) -> str:
    """The kind of a difference in this entry of a state."""
    return name.partition(" ")[0]


def distance_of(own: Summary, other: Summary) -> float:
    """The largest difference among the values, or where they are equal, that of the sums."""
    if len(own.values) != len(other.values):
        return math.inf
    largest = max(map(distance, own.values, other.values), default=0.0)
    # The element that differs may not be among the values.
    return largest or distance(own.sum, other.sum)


def distance(own: float | None, other: float | None) -> float:
    """How far two numbers are apart; infinite if one of them is missing or not finite."""
    if are_equal(own, other):
        return 0.0
    if own is None or other is None:
        return math.inf
    difference = abs(own - other)
    return math.inf if math.isnan(difference) else difference


def are_equal(own: float | None, other: float | None) -> bool:
    """Whether two numbers are the same, or neither is a number."""
    # As text: a nan is not equal to itself, and 0.0 differs from -0.0 in a bit.
    return repr(own) == repr(other)


def differences_of_evaluations(own: Rank, other: Rank, is_same: IsSame) -> Iterator[Difference]:
    """The metrics of validations and tests that differ."""
    for key in sorted(own.evaluations.keys() | other.evaluations.keys()):
        stage, _, step = key
        where = f"{stage} after step {step}"
        ours, theirs = own.evaluations.get(key), other.evaluations.get(key)
        if ours is None or theirs is None:
            yield Difference("metric", only_in_one(key, own.evaluations, where), step)
            continue
        for found in differences_of_metrics(ours, theirs, is_same):
            yield found.within(f"in the {where}", step)


def differences_of_metrics(
    own: Mapping[str, float], other: Mapping[str, float], is_same: IsSame
) -> Iterator[Difference]:
    """The metrics that differ."""
    for name in sorted(own.keys() | other.keys()):
        value, expected = own.get(name), other.get(name)
        if not is_same(value, expected):
            amount = distance(value, expected)
            yield Difference("metric", f"in {name} by {amount:.2g}", amount=amount)


def differences_of_rows(run_dir: Path, other_dir: Path) -> Iterator[Difference]:
    """The rows of metrics.csv that differ."""
    ours, theirs = rows_of(run_dir), rows_of(other_dir)
    for step in sorted(ours.keys() | theirs.keys()):
        if (step in ours) != (step in theirs):
            yield Difference("row", only_in_one(step, ours, f"row of step {step}"), step)
            continue
        for found in differences_of_metrics(ours[step], theirs[step], are_equal):
            yield found.within(f"metrics.csv, row of step {step}:", step)._replace(kind="row")


def rows_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The rows of metrics.csv by their steps, without what is measured in seconds and bytes."""
    rows = {}
    for row in read_history(run_dir):
        kept = {name: value for name, value in row.items() if not MEASURED.fullmatch(name)}
        rows[int(row["step"])] = kept
    return rows


def differences_of_results(
    run_dir: Path, other_dir: Path, tolerance: Tolerance
) -> Iterator[Difference]:
    """The final metrics that differ by more than rounding."""
    ours, theirs = results_of(run_dir), results_of(other_dir)
    for found in differences_of_metrics(ours, theirs, tolerance.is_near):
        yield found.within("metrics.json:")


def results_of(run_dir: Path) -> dict[str, float]:
    """The final metrics of a run that are about what was learned."""
    metrics = read_final_metrics(run_dir) or {}
    return {name: value for name, value in metrics.items() if is_result(name)}


# -- Ranks -----------------------------------------------------------------------------------------


def differences_between(ranks: Sequence[Rank]) -> Iterator[Difference]:
    """Where the ranks of one run have diverged: other weights, or other metrics."""
    zero = ranks[0]
    for number, rank in enumerate(ranks[1:], 1):
        between = f"rank {number} differs from rank 0"
        # What a checkpoint does not hold may differ: state that each rank has for itself.
        weights = select(rank.final, WEIGHTS), select(zero.final, WEIGHTS)
        for found in differences_of_states(*weights):
            yield found.within(f"{between} at the end of training in")._replace(kind="ranks")
        for found in differences_of_evaluations(rank, zero, are_equal):
            yield found.within(between, found.step)._replace(kind="ranks")


def select(state: Summaries | None, kinds: Collection[str]) -> Summaries:
    """The entries of a state that are of these kinds."""
    if state is None:
        return {}
    return {name: state[name] for name in state if kind_of(name) in kinds}


def differences_from_one(
    ours: Sequence[Rank], one: Rank, tolerance: Tolerance
) -> Iterator[Difference]:
    """Where several ranks differ from one rank by more than rounding, the samples first.

    The losses are not compared: each rank has that of its slice. Buffers are compared at the end
    only: each rank changes them by its own samples until their mean is taken.
    """
    yield from differences_of_samples(ours, one)
    zero = ours[0]
    for place in sorted(one.batches.keys() & zero.batches.keys()):
        step = one.batches[place].step
        own = select(zero.batches[place].state, PARAMETERS)
        other = select(one.batches[place].state, PARAMETERS)
        for found in differences_of_weights(own, other, tolerance.after(step + 1)):
            yield found.within(f"{place_of(step, place)} in", step)
    at_end = tolerance.after(len(one.batches))
    weights = select(zero.final, WEIGHTS), select(one.final, WEIGHTS)
    for found in differences_of_weights(*weights, at_end):
        yield found.within("at the end of training in")
    yield from differences_of_evaluations(zero, one, at_end.is_near)


def differences_of_samples(ours: Sequence[Rank], one: Rank) -> Iterator[Difference]:
    """The steps in which all ranks together see other samples than one rank."""
    places = sorted(one.batches.keys() | ours[0].batches.keys())
    for place in places:
        rows: list[int] = []
        for rank in ours:
            rows += rank.rows_at(place)
        expected = one.rows_at(place)
        # In any order: each rank has a slice.
        if sorted(rows) == sorted(expected):
            continue
        step = (ours[0].batches | one.batches)[place].step
        # A DataLoader has a batch for each rank, so a step has as many samples, or as many for each
        # rank. Any other number means that a batch was cut wrongly. The last one may be short.
        is_cut = len(rows) not in (len(expected), len(ours) * len(expected))
        kind = "slice" if is_cut and place == places[0] else "samples"
        found = Difference(kind, count_others(rows, expected))
        yield found.within(place_of(step, place), step)


def differences_of_weights(
    own: Summaries, other: Summaries, tolerance: Tolerance
) -> Iterator[Difference]:
    """The tensors that differ by more than rounding, the one that differs most first."""
    ours, theirs = records.read_state(own), records.read_state(other)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield Difference(kind_of(name), f"whether there is {name}")
    beyond = []
    for name in ours.keys() & theirs.keys():
        found = difference_of_tensor(name, ours[name], theirs[name])
        if found is not None and not is_rounding(ours[name], theirs[name], tolerance):
            beyond.append(found)
    yield from sorted(beyond, key=lambda found: -found.amount)


def is_rounding(own: Summary, other: Summary, tolerance: Tolerance) -> bool:
    """Whether a tensor differs by no more than rounding."""
    scale = max(map(abs, other.values), default=0.0)
    # The sums have all elements in them, the values only some.
    of_sums = distance(own.sum, other.sum)
    has_near_values = tolerance.allows(distance_of(own, other), scale)
    return has_near_values and tolerance.allows(of_sums, other.absolute_sum)
