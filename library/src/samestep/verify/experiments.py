"""The experiments: what is started, how it is harmed, and what it is compared with.

``undisturbed``          once, as the reference; its steps say where the others are harmed
``again``                a second time: whether the run is reproducible at all
``SIGTERM``              stopped within an epoch, and continued by the same command
``SIGTERM within a step``  the same, before the last batch of a step that accumulates several
``SIGKILL``              killed some steps after a checkpoint, and continued
``ranks``                several ranks against one: with virtual ranks bit by bit, otherwise with 64
                         bits, where possible
``ranks, SIGTERM``       several ranks that are stopped, against several that are not
"""

import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.failure import EXIT_SIGTERM
from samestep.verify import compare, known_notes, records
from samestep.verify.compare import Difference
from samestep.verify.known_notes import INTERRUPTED, RANKS, KnownNote
from samestep.verify.plan import Plan, done_file
from samestep.verify.program import Attempt, Programs
from samestep.verify.records import Place, Rank

UNDISTURBED, AGAIN = "undisturbed", "undisturbed again"
STOPPED, STOPPED_WITHIN = "SIGTERM", "SIGTERM within a step"
KILLED = "SIGKILL"

IDENTICAL, ANNOUNCED, REJECTED = "identical", "announced", "rejected"
DIFFERS, FAILED, NOT_RUN = "differs", "failed", "not run"
GOOD = (IDENTICAL, ANNOUNCED, REJECTED, NOT_RUN)

BATCHES_PER_RANK = 2  # of a validation or test
DOUBLE = "64-true"


class Cell(NamedTuple):
    """The result of one experiment."""

    word: str
    """One of ``IDENTICAL``, ``ANNOUNCED``, ..."""
    why: str = ""
    difference: Difference | None = None
    note: KnownNote | None = None
    """What has announced it."""
    said: str = ""
    """The line with which the run has done so."""


@dataclass(frozen=True)
class Settings:
    """What is verified, and how.

    Attributes:
        command: the user's, without its variables.
        directory: where the experiments work and record.
        make_workplace: makes the current directory of one run, given its name.
        ranks: of the experiments on several ranks; 1 leaves them out.
        num_steps: optimizer steps of a run; None leaves the limits of the command alone.
        accelerator: ``cpu`` or ``gpu``.
        timeout_s: after which a program is ended.
        jobs: programs at once.
        again: whether to run the undisturbed run twice.
        in_double: whether to compare ranks with 64 bits where the model allows it.
        with_results: whether the final metrics of several ranks must be those of one, too: not
            where training logs a value per step, which is that of a slice.
        variables: added to those of this process.
    """

    command: Sequence[str]
    directory: Path
    make_workplace: Callable[[str], Path]
    ranks: int = 2
    num_steps: int | None = 40
    accelerator: str = "cpu"
    timeout_s: float = 600.0
    jobs: int = 1
    again: bool = True
    in_double: bool = True
    with_results: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


class Run(NamedTuple):
    """One run of an experiment: its programs, and what they have left."""

    name: str
    attempts: list[Attempt]
    ranks: list[Rank]

    @property
    def last(self) -> Attempt:
        """The program that should have ended the run."""
        return self.attempts[-1]

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should, after training."""
        return self.last.code == 0 and bool(self.ranks)

    @property
    def said(self) -> str:
        """What its programs have printed, each before its first step."""
        return "\n".join(attempt.before for attempt in self.attempts)

    @property
    def said_in_all(self) -> str:
        """All that its programs have printed."""
        return "\n".join(attempt.before + attempt.after for attempt in self.attempts)

    @property
    def run_dirs(self) -> list[Path]:
        """Its run directories: one, unless it is not a run."""
        return sorted({Path(fit["fit"]) for fit in self.ranks[0].fits})

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        return self.run_dirs[0]


Result = TypeVar("Result")
Task = Callable[[], dict[str, Cell]]
"""Some experiments: returns their cells."""


class Experiments:
    """Runs a command undisturbed and harmed, and judges what each run leaves.

    Args:
        settings: what is verified, and how.
        show: gets a line when an experiment begins and when it ends.
    """

    def __init__(self, settings: Settings, show: Callable[[str], object] = str) -> None:
        self.settings = settings
        self.show = show
        self._programs = Programs()
        self._num_wanted = 0
        self._num_done = 0
        self.undisturbed = Run(UNDISTURBED, [], [])
        """The reference of the experiments on one rank."""
        self.compared_with = ""
        """The precision in which several ranks are compared with one; empty: by equality."""

    @property
    def on_ranks(self) -> str:
        """The name of the experiment on several ranks."""
        return f"{self.settings.ranks} ranks"

    @property
    def ranks_stopped(self) -> str:
        """The name of the experiment in which several ranks are stopped."""
        return f"{self.on_ranks}, {STOPPED}"

    @property
    def adds_in_order(self) -> bool:
        """Whether several ranks get ``deterministic=True``, without which they differ by rounding.

        Two numbers have one sum in any order. On GPUs more would change than the sums.
        """
        return self.settings.ranks > 2 and self.settings.accelerator == "cpu"

    def names(self) -> list[str]:
        """All experiments, in the order of the table."""
        names = [UNDISTURBED]
        if self.settings.again:
            names.append(AGAIN)
        names += [STOPPED, STOPPED_WITHIN, KILLED]
        if self.settings.ranks > 1:
            names += [self.on_ranks, self.ranks_stopped]
        return names

    def run(self, chosen: Sequence[str] = ()) -> dict[str, Cell]:
        """The cells of these experiments, or of all of them, in the order of the table."""
        wanted = [name for name in self.names() if not chosen or name in chosen]
        started = self._begin(UNDISTURBED)
        (undisturbed,) = self._run_tasks([self._run_undisturbed])
        is_useful = undisturbed.word not in (REJECTED, FAILED)
        # A run that never accumulates has no such place, and the table no such line.
        if is_useful and STOPPED_WITHIN in wanted and self._choose_place(STOPPED_WITHIN) is None:
            wanted.remove(STOPPED_WITHIN)
        # Counted only now, so that the first line has the same number as the last one.
        self._num_wanted = len({UNDISTURBED, *wanted})
        self._end(UNDISTURBED, undisturbed, started)
        if not is_useful:
            # The other cells would only repeat what stopped this run.
            return dict.fromkeys(wanted, undisturbed)
        self._show_estimate(time.monotonic() - started, is_again=AGAIN in wanted)
        cells = {UNDISTURBED: undisturbed}
        for found in self._run_tasks(self._tasks_for(wanted)):
            cells |= found
        return {name: cells[name] for name in wanted}

    def _tasks_for(self, wanted: Sequence[str]) -> list[Task]:
        """What must be done for these experiments beside the undisturbed run, in any order."""
        tasks: list[Task] = []
        if AGAIN in wanted:
            tasks.append(partial(self._timed, AGAIN, self._run_again))
        for name in (STOPPED, STOPPED_WITHIN, KILLED):
            if name in wanted:
                tasks.append(partial(self._timed, name, partial(self._run_harmed, name)))
        if self.on_ranks in wanted or self.ranks_stopped in wanted:
            tasks.append(partial(self._run_on_ranks, stops=self.ranks_stopped in wanted))
        return tasks

    def _run_tasks(self, tasks: Sequence[Callable[[], Result]]) -> Iterator[Result]:
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            try:
                yield from pool.map(lambda task: task(), tasks)
            except BaseException:
                # Such as Ctrl-C: the programs have sessions of their own, and do not get it.
                self._programs.end_all()
                raise

    def _timed(self, name: str, function: Callable[[], Cell]) -> dict[str, Cell]:
        started = self._begin(name)
        cell = function()
        self._end(name, cell, started)
        return {name: cell}

    def _begin(self, name: str) -> float:
        self.show(f"{name} ...")
        return time.monotonic()

    def _end(self, name: str, cell: Cell, started: float) -> None:
        seconds = time.monotonic() - started
        self._num_done += 1
        self.show(f"[{self._num_done}/{self._num_wanted}] {name}: {cell.word} ({seconds:.0f} s)")

    def _show_estimate(self, seconds: float, *, is_again: bool) -> None:
        """Say how long the other experiments take; ``seconds`` is how long the first one did."""
        # Two for each: a run that is harmed has a second program, and several ranks are compared
        # with a program of 64 bits.
        num = 2 * (self._num_wanted - 1) - is_again
        if num:
            minutes = math.ceil(seconds * num / self.settings.jobs / 60)
            at_once = f"{self.settings.jobs} at once"
            self.show(f"{num} more programs of {seconds:.0f} s, {at_once}: about {minutes} min")

    # -- Runs --------------------------------------------------------------------------------------

    def _plan(self, name: str, ranks: int, precision: str | None = None) -> Plan:
        """What a program does in this run, if it is not harmed."""
        folder = self.settings.directory / slug(name)
        return Plan(
            records=str(folder / "records"),
            devices=ranks,
            accelerator=self.settings.accelerator,
            run_root=str(folder / "runs"),
            num_steps=self.settings.num_steps,
            num_evaluated=self._num_evaluated(ranks),
            precision=precision,
            adds_in_order=ranks > 1 and self.adds_in_order,
        )

    def _num_evaluated(self, ranks: int) -> int:
        """Batches of a validation on each rank, so that all ranks see what one rank sees."""
        total = BATCHES_PER_RANK * self.settings.ranks
        # Lightning gives the batches of a DataLoader to the ranks in turn. One that is split, and a
        # BatchLoader, gives each rank a slice of every batch.
        of_ranks = self.undisturbed.ranks
        if not of_ranks or of_ranks[0].splits_evaluation:
            return total
        return total // ranks

    def _start(self, plan: Plan, name: str) -> Attempt:
        """Start one program of a run, and wait for its end."""
        settings = self.settings
        workplace = settings.make_workplace(slug(name))
        variables = environment.variables() | dict(settings.variables)
        variables |= {environment.PLUGIN: "samestep.verify.changes"}
        variables |= {environment.VERIFY: plan.to_json(), "RUN_ID": f"verify-{slug(name)}"}
        # A script may call it itself, and nothing of an experiment may be uploaded.
        variables["WANDB_MODE"] = "disabled"
        if plan.accelerator == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
            # The ranks meet before the Trainer says what they compute on.
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return self._programs.run(settings.command, workplace, variables, settings.timeout_s)

    def _run(self, plan: Plan, name: str) -> Run:
        """A run that is not harmed."""
        attempt = self._start(plan, name)
        return Run(name, [attempt], records.read(Path(plan.records)))

    def _run_undisturbed(self) -> Cell:
        run = self._run(self._plan(UNDISTURBED, 1), UNDISTURBED)
        self.undisturbed = run
        failure = judge_end(run)
        if failure is not None:
            return failure
        if len(run.run_dirs) > 1:
            names = ", ".join(path.name for path in run.run_dirs)
            raise ConfigError(f"the command trains several runs ({names}); verify one at a time")
        return Cell(IDENTICAL)

    def _run_again(self) -> Cell:
        """Whether the run is reproducible at all."""
        run = self._run(self._plan(AGAIN, 1), AGAIN)
        return judge_end(run) or self._judge(run, self.undisturbed, AGAIN)

    def _run_harmed(self, name: str) -> Cell:
        signum = signal.SIGKILL if name == KILLED else signal.SIGTERM
        plan = self._plan(name, 1)
        plan = replace(plan, signum=signum, place=self._choose_place(name))
        return self._harm(plan, name, self.undisturbed)

    def _harm(self, plan: Plan, name: str, reference: Run) -> Cell:
        """Stop or kill a run at the place of its plan, and continue it by the same command."""
        attempt = self._start(plan, name)
        if attempt.is_rejection:
            return Cell(REJECTED, attempt.why)
        if not done_file(Path(plan.records)).exists():
            return Cell(FAILED, f"it was not harmed: {attempt.why}")
        # A run that is stopped says so by its exit code; of a killed one the kernel does.
        is_stopped = plan.signum == signal.SIGTERM
        expected = EXIT_SIGTERM if is_stopped else -signal.SIGKILL
        if attempt.code != expected:
            return Cell(FAILED, f"after {signal.Signals(plan.signum).name}: {attempt.why}")
        run = Run(name, [attempt, self._start(plan, name)], records.read(Path(plan.records)))
        failure = judge_end(run)
        if failure is not None:
            return failure
        # A folder with the time in its name, such as runs/2026-11-26, is never continued.
        if len(run.run_dirs) > 1:
            return Cell(FAILED, "the same command has begun a new run: its run_dir has changed")
        return self._judge(run, reference, INTERRUPTED)

    def _run_on_ranks(self, *, stops: bool) -> dict[str, Cell]:
        """The two experiments on several ranks; the second is compared with the first."""
        one = self._reference_in_double()
        name, num = self.on_ranks, self.settings.ranks
        precision = DOUBLE if self.compared_with == DOUBLE else None
        runs: list[Run] = []

        def run_undisturbed() -> Cell:
            runs.append(self._run(self._plan(name, num, precision), name))
            return judge_end(runs[0]) or self._judge_ranks(runs[0], one)

        def run_stopped() -> Cell:
            reference = runs[0]
            # Nothing to compare with.
            failure = judge_end(reference)
            if failure is not None:
                return failure
            plan = self._plan(self.ranks_stopped, num, precision)
            # Their batches are not those of one rank, if the loader is an ordinary one.
            place = choose_place(STOPPED, reference.ranks[-1])
            plan = replace(plan, signum=signal.SIGTERM, place=place)
            return self._harm(plan, self.ranks_stopped, reference)

        cells = self._timed(name, run_undisturbed)
        if stops:
            cells |= self._timed(self.ranks_stopped, run_stopped)
        return cells

    def _reference_in_double(self) -> Run:
        """The run on one rank with which several are compared: with 64 bits, where it can be."""
        facts = self.undisturbed.ranks[0].fits[0]
        if facts["is_virtual"]:
            return self.undisturbed
        self.compared_with = own = str(facts["precision"])
        if own == DOUBLE or not self.settings.in_double:
            return self.undisturbed
        name = f"{UNDISTURBED}, {DOUBLE}"
        run = self._run(self._plan(name, 1, precision=DOUBLE), name)
        # A model may name its type of numbers itself.
        if not run.is_whole:
            return self.undisturbed
        self.compared_with = DOUBLE
        return run

    def _choose_place(self, name: str) -> Place | None:
        return choose_place(name, self.undisturbed.ranks[0])

    # -- Judgement ---------------------------------------------------------------------------------

    def _judge(self, run: Run, reference: Run, column: str) -> Cell:
        """A run against another one on the same ranks."""
        found = compare.first_of(compare.differences_between(run.ranks))
        if found is None:
            # With virtual ranks rank zero has the first slice, whatever the number of ranks.
            ours = run.ranks[: len(reference.ranks)]
            found = compare.first_difference(ours, reference.ranks, run.run_dir, reference.run_dir)
        return self._cell(found, run, column)

    def _judge_ranks(self, run: Run, one: Run) -> Cell:
        """A run on several ranks against one on one rank."""
        if not self.compared_with:
            return self._judge(run, one, RANKS)
        return self._cell(compare.first_of(self._differences_of_ranks(run, one)), run, RANKS)

    def _differences_of_ranks(self, run: Run, one: Run) -> Iterator[Difference]:
        tolerance = compare.TOLERANCES.get(self.compared_with, compare.FLOAT16)
        (zero,) = one.ranks
        yield from compare.differences_between(run.ranks)
        yield from compare.differences_from_one(run.ranks, zero, tolerance)
        if self.settings.with_results:
            at_end = tolerance.after(len(zero.batches))
            yield from compare.differences_of_results(run.run_dir, one.run_dir, at_end)

    def _cell(self, found: Difference | None, run: Run, column: str) -> Cell:
        if found is None:
            return Cell(IDENTICAL)
        explained = known_notes.find(run.said, column, found.kind)
        # A note about the data must not hide that a batch was cut wrongly.
        if explained is not None and not found.is_inexcusable:
            note, line = explained
            return Cell(ANNOUNCED, note.meaning, found, note, line)
        seen = known_notes.find(run.said_in_all, column, found.kind, known_notes.EFFECTS)
        return Cell(DIFFERS, found.text, found, *(seen or ()))


def choose_place(name: str, rank: Rank) -> Place | None:
    """Where a run is harmed: in the middle of an epoch that has others around it.

    None if there is no such place: no step accumulates several batches.
    """
    epochs = sorted({epoch for epoch, _ in rank.batches})
    # A checkpoint of the epoch before exists then, which matters after SIGKILL.
    epoch = epochs[min(len(epochs) - 1, 2 if name == KILLED else 1)]
    firsts: list[Place] = []
    others: list[Place] = []
    steps = set()
    for place in sorted(rank.batches):
        if place[0] != epoch:
            continue
        step = rank.batches[place].step
        # The first batch of an optimizer step, or a further one, whose gradients are added.
        chosen = others if step in steps else firsts
        chosen.append(place)
        steps.add(step)
    places = others if name == STOPPED_WITHIN else firsts
    return places[len(places) // 2] if places else None


def judge_end(run: Run) -> Cell | None:
    """The cell of a run that did not end as it should; None if it did."""
    if run.attempts[0].is_rejection:
        return Cell(REJECTED, run.attempts[0].why)
    if run.last.code != 0:
        return Cell(FAILED, run.last.why)
    if not run.ranks:
        return Cell(FAILED, "it has trained nothing")
    return None


def slug(name: str) -> str:
    """The name of a folder for an experiment."""
    return re.sub(r"\W+", "-", name).lower()
