"""The experiments: what is started, how it is harmed, and what it is compared with.

``undisturbed``          once, as the reference; its steps say where the others are harmed
``again``                a second time: whether the run is reproducible at all
``SIGTERM``              stopped within an epoch, and continued by the same command
``SIGTERM within a step``  the same, before the last batch of a step that accumulates several
``SIGKILL``              killed some steps after a checkpoint, and continued
``ranks``                several ranks against one, where possible with 64 bits
``ranks, SIGTERM``       several ranks that are stopped, against several that are not
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.failure import EXIT_SIGTERM
from samestep.verify import compare, known_notes, program, records
from samestep.verify.compare import Difference
from samestep.verify.known_notes import INTERRUPTED, RANKS, KnownNote
from samestep.verify.plan import Plan
from samestep.verify.program import Attempt
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
    def run_dir(self) -> Path:
        """Its run directory."""
        return Path(self.ranks[0].fits[-1]["fit"])


Progress = Callable[[str, Cell | None, float], None]
"""Called with the name of an experiment as it begins (no cell), and with its cell and seconds as
it ends."""


class Experiments:
    """Runs a command undisturbed and harmed, and judges what each run leaves.

    Args:
        settings: what is verified, and how.
        show: reports the progress.
    """

    def __init__(
        self, settings: Settings, show: Progress = lambda name, cell, seconds: None
    ) -> None:
        self.settings = settings
        self.show = show
        self.undisturbed = Run(UNDISTURBED, [], [])
        """The reference of the experiments on one rank."""
        self.compared_with = ""
        """The precision of the experiments on several ranks."""

    @property
    def on_ranks(self) -> str:
        """The name of the experiment on several ranks."""
        return f"{self.settings.ranks} ranks"

    @property
    def ranks_stopped(self) -> str:
        """The name of the experiment in which several ranks are stopped."""
        return f"{self.on_ranks}, {STOPPED}"

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
        cells = {UNDISTURBED: self._timed(UNDISTURBED, self._run_undisturbed)}
        if cells[UNDISTURBED].word in (REJECTED, FAILED):
            # The other cells would only repeat what stopped this run.
            return dict.fromkeys(wanted, cells[UNDISTURBED])
        tasks: list[Callable[[], dict[str, Cell]]] = []
        for name in (AGAIN, STOPPED, STOPPED_WITHIN, KILLED):
            if name in wanted:
                tasks.append(self._task_on_one_rank(name))
        if self.on_ranks in wanted or self.ranks_stopped in wanted:
            tasks.append(lambda: self._run_on_ranks(wanted))
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            try:
                for found in pool.map(lambda task: task(), tasks):
                    cells |= found
            except BaseException:
                # Such as Ctrl-C: the programs have sessions of their own, and do not get it.
                program.end_all()
                raise
        return {name: cells[name] for name in wanted if name in cells}

    def _timed(self, name: str, function: Callable[[], Cell]) -> Cell:
        self.show(name, None, 0.0)
        started = time.monotonic()
        cell = function()
        self.show(name, cell, time.monotonic() - started)
        return cell

    def _task_on_one_rank(self, name: str) -> Callable[[], dict[str, Cell]]:
        reference = self.undisturbed
        if name == AGAIN:
            return lambda: {name: self._timed(name, lambda: self._run_again(reference))}
        place = self._choose_place(name, reference)
        # A run that never accumulates has no such place, and the table no such line.
        if place is None and name == STOPPED_WITHIN:
            return dict
        signum = signal.SIGKILL if name == KILLED else signal.SIGTERM
        plan = self._plan(name, 1, signum=signum, place=place)
        return lambda: {name: self._timed(name, lambda: self._harm(plan, name, reference))}

    # -- Runs --------------------------------------------------------------------------------------

    def _plan(
        self, name: str, ranks: int, *, signum: int = 0, place: Place | None = None,
        precision: str | None = None,
    ) -> Plan:  # fmt: skip
        """What a program does in this run."""
        folder = self.settings.directory / slug(name)
        return Plan(
            records=str(folder / "records"),
            devices=ranks,
            accelerator=self.settings.accelerator,
            run_root=str(folder / "runs"),
            num_steps=self.settings.num_steps,
            num_evaluated=self._num_evaluated(ranks),
            precision=precision,
            signum=signum,
            place=place,
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
        variables |= {environment.VERIFY: plan.to_json(), "RUN_ID": f"verify-{slug(name)}"}
        # A script may call it itself, and nothing of an experiment may be uploaded.
        variables["WANDB_MODE"] = "disabled"
        if plan.accelerator == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
            # The ranks meet before the Trainer says what they compute on.
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return program.run(settings.command, workplace, variables, settings.timeout_s)

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
        names = {fit["fit"] for fit in run.ranks[0].fits}
        if len(names) > 1:
            raise ConfigError(
                f"the command trains {len(names)} runs ({', '.join(map(name_of, names))}); verify "
                "one at a time"
            )
        return Cell(IDENTICAL)

    def _run_again(self, reference: Run) -> Cell:
        """Whether the run is reproducible at all."""
        run = self._run(self._plan(AGAIN, 1), AGAIN)
        return judge_end(run) or self._judge(run, reference, AGAIN)

    def _harm(self, plan: Plan, name: str, reference: Run) -> Cell:
        """Stop or kill a run at the place of its plan, and continue it by the same command."""
        if plan.place is None:
            return Cell(FAILED, "the run has too few batches to be harmed")
        attempt = self._start(plan, name)
        if attempt.is_rejection:
            return Cell(REJECTED, attempt.why)
        if not records.done_file(Path(plan.records)).exists():
            return Cell(FAILED, f"it was not harmed: {attempt.why}")
        signum = signal.Signals(plan.signum)
        is_stopped = signum == signal.SIGTERM
        expected = EXIT_SIGTERM if is_stopped else -signal.SIGKILL
        # Of several ranks that are killed, their agent returns the code.
        if attempt.code not in (expected, 128 + signum):
            return Cell(FAILED, f"after {signum.name}: {attempt.why}")
        run = Run(name, [attempt, self._start(plan, name)], records.read(Path(plan.records)))
        failure = judge_end(run)
        if failure is not None:
            return failure
        if len({fit["fit"] for fit in run.ranks[0].fits}) > 1:
            return Cell(FAILED, "the same command has begun a new run: its run_dir has changed")
        return self._judge(run, reference, INTERRUPTED)

    def _run_on_ranks(self, wanted: Sequence[str]) -> dict[str, Cell]:
        """The two experiments on several ranks; the second is compared with the first."""
        cells: dict[str, Cell] = {}
        runs: list[Run] = []

        def run_undisturbed() -> Cell:
            one = self._reference_in_double()
            precision = DOUBLE if self.compared_with == DOUBLE else None
            plan = self._plan(self.on_ranks, self.settings.ranks, precision=precision)
            run = self._run(plan, self.on_ranks)
            failure = judge_end(run)
            if failure is not None:
                return failure
            runs.append(run)
            return self._judge_ranks(run, one)

        def run_stopped() -> Cell:
            (reference,) = runs
            place = self._choose_place(STOPPED, reference)
            precision = DOUBLE if self.compared_with == DOUBLE else None
            plan = self._plan(
                self.ranks_stopped,
                self.settings.ranks,
                signum=signal.SIGTERM,
                place=place,
                precision=precision,
            )
            return self._harm(plan, self.ranks_stopped, reference)

        cells[self.on_ranks] = self._timed(self.on_ranks, run_undisturbed)
        if self.ranks_stopped not in wanted:
            return cells
        if runs:
            cells[self.ranks_stopped] = self._timed(self.ranks_stopped, run_stopped)
        else:
            cells[self.ranks_stopped] = cells[self.on_ranks]
        return cells

    def _reference_in_double(self) -> Run:
        """The run on one rank with which several are compared: with 64 bits, where it can be."""
        own = str(self.undisturbed.ranks[0].fits[0]["precision"])
        self.compared_with = own
        if own == DOUBLE or not self.settings.in_double:
            return self.undisturbed
        name = f"{UNDISTURBED}, {DOUBLE}"
        run = self._run(self._plan(name, 1, precision=DOUBLE), name)
        # A model may name its type of numbers itself.
        if not run.is_whole:
            return self.undisturbed
        self.compared_with = DOUBLE
        return run

    # -- Places ------------------------------------------------------------------------------------

    def _choose_place(self, name: str, reference: Run) -> Place | None:
        """Where a run is harmed: in the middle of an epoch that has others around it."""
        batches = reference.ranks[-1].batches
        epochs = sorted({epoch for epoch, _ in batches})
        if not epochs:
            return None
        # A checkpoint of the epoch before exists then, which matters after SIGKILL.
        number = 2 if name == KILLED else 1
        epoch = epochs[min(number, len(epochs) - 1)]
        places = sorted(place for place in batches if place[0] == epoch)
        steps = [batches[place].step for place in places]
        first_of_step = [
            index for index, step in enumerate(steps) if index == 0 or step != steps[index - 1]
        ]
        within_step = [index for index in range(len(places)) if index not in first_of_step]
        indices = within_step if name == STOPPED_WITHIN else first_of_step
        return places[indices[len(indices) // 2]] if indices else None

    # -- Judgement ---------------------------------------------------------------------------------

    def _judge(self, run: Run, reference: Run, column: str) -> Cell:
        """A run against another one on the same ranks."""
        found = compare.difference_of_ranks(run.ranks) or compare.first_difference(
            run.ranks, reference.ranks, run.run_dir, reference.run_dir
        )
        return self._cell(found, run, column)

    def _judge_ranks(self, run: Run, one: Run) -> Cell:
        """A run on several ranks against one on one rank."""
        found = compare.difference_of_ranks(run.ranks)
        found = found or compare.difference_of_samples(run.ranks, one.ranks[0])
        tolerance = compare.TOLERANCES.get(self.compared_with, compare.FLOAT16)
        found = found or compare.difference_beyond(run.ranks, one.ranks[0], tolerance)
        if found is None and self.settings.with_results:
            at_end = tolerance.after(len(one.ranks[0].batches))
            found = compare.difference_of_results(run.run_dir, one.run_dir, at_end)
        return self._cell(found, run, RANKS)

    def _cell(self, found: Difference | None, run: Run, column: str) -> Cell:
        if found is None:
            return Cell(IDENTICAL)
        explained = known_notes.find(run.said, column, found.kind)
        if explained is None or found.is_inexcusable:
            return Cell(DIFFERS, found.text, found)
        note, line = explained
        return Cell(ANNOUNCED, note.meaning, found, note, line)


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
    return "".join(letter if letter.isalnum() else "-" for letter in name).lower()


def name_of(path: str) -> str:
    """The name of a run directory."""
    return Path(path).name
