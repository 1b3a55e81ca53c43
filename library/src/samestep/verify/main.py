"""Prove on your own code and machine that a run is the same, harmed or on several ranks.

samestep verify -- python train.py model=mine
samestep verify --ranks 3 --steps 60 -- python my_script.py
samestep verify --gpu -- python train.py trainer=gpu

The command is run several times in a scratch directory, where runs, outputs and .git are missing
and everything else is a link to the current directory: undisturbed twice, stopped by SIGTERM,
killed, each continued by the same command, and on several ranks. Each run has few steps, in three
epochs. Its trackers, stores and reports are switched off. Results: identical (to the last bit, on
several ranks up to rounding), announced (by a note before the first step), rejected (by one
message), differs.

Exit codes: 0 nothing differs silently, 1 something does, or fails, 2 invalid arguments, or the
command trains nothing with samestep.Trainer.
"""

import json
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from samestep.command_line import Parser
from samestep.errors import ConfigError, RunError
from samestep.plugins import device_option
from samestep.ranks import environment
from samestep.ranks.failure import EXIT_SIGTERM
from samestep.verify import hints
from samestep.verify.experiments import (
    DIFFERS,
    GOOD,
    IDENTICAL,
    NOT_RUN,
    Cell,
    Experiments,
    Run,
    Settings,
)
from samestep.verify.plan import NUM_EPOCHS

LEAST_STEPS = 2 * NUM_EPOCHS
MOST_JOBS = 4
MOST_SIBLINGS = 200  # of the current directory, to link to; a folder such as /tmp has thousands
LAST_LINES = 12  # of a command that fails
LEFT_OUT = (
    "runs", "outputs", "multirun", "lightning_logs", "wandb", "mlruns", ".git",
)  # fmt: skip
"""Entries of the current directory in which runs write, or that change while they run."""
WIDTH = 100  # characters of a line
NEEDS_DASHES = "samestep verify: needs the command that trains, after two dashes, such as"


def main(argv: Sequence[str]) -> int:
    """Run the experiments, and print the table. Returns the exit code."""
    own, command = split_at_dashes(argv)
    arguments = parse(own)
    check_command(command)
    # Now, not after some minutes of experiments on one rank.
    gpus = check_gpus() if arguments.gpu else None
    with scratch_folder(arguments.keep) as folder:
        started = time.monotonic()
        experiments = Experiments(settings_of(arguments, command, folder, gpus), show_progress)
        cells = experiments.run(arguments.only)
        check_undisturbed(experiments.undisturbed)
        if experiments.settings.ranks < arguments.ranks:
            cells[f"{arguments.ranks} ranks"] = Cell(NOT_RUN, f"this machine has {gpus} GPUs")
    if arguments.json:
        print(json.dumps(as_json(cells), indent=2))
    else:
        print_table(cells, experiments, time.monotonic() - started)
    is_good = all(cell.word in GOOD for cell in cells.values())
    return 0 if is_good else 1


@contextmanager
def scratch_folder(keep: Path | None) -> Iterator[Path]:
    """The folder of the experiments, which is removed unless ``keep`` names it."""
    folder = keep or Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    # Otherwise SIGTERM would end this process at once, and leave the folder and programs behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGTERM))
    try:
        yield folder.absolute()
    finally:
        signal.signal(signal.SIGTERM, before)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def settings_of(
    arguments: Namespace, command: Sequence[str], folder: Path, gpus: int | None
) -> Settings:
    """What is verified, and how; ``gpus`` is the number of GPUs, None to train on CPUs."""
    ranks, accelerator = arguments.ranks, "cpu"
    if gpus is not None:
        ranks, accelerator = min(ranks, gpus), "gpu"
    return Settings(
        command=command,
        directory=folder,
        make_workplace=lambda name: make_workplace(folder / name),
        ranks=ranks,
        num_steps=arguments.steps,
        accelerator=accelerator,
        timeout_s=arguments.timeout_s,
        jobs=arguments.jobs or default_jobs(on_gpu=arguments.gpu),
    )


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the command after the dashes."""
    words = list(argv)
    if "--" not in words:
        # `samestep verify python train.py`, as with time and nohup.
        if words and shutil.which(words[0]):
            raise ConfigError(f"{NEEDS_DASHES} samestep verify -- {shlex.join(words)}")
        return words, []
    index = words.index("--")
    return words[:index], words[index + 1 :]


def parse(argv: Sequence[str]) -> Namespace:
    """Our own arguments.

    Raises:
        ConfigError: if one is unknown or wrong.
    """
    parser = Parser("samestep verify", __doc__)
    parser.usage = f"{parser.prog} [options] -- command"
    add = parser.add_argument
    add("--ranks", type=whole(2), default=2, metavar="N",
        help="ranks of the runs with several; default: 2")  # fmt: skip
    add("--steps", type=whole(LEAST_STEPS), default=40, metavar="N",
        help="optimizer steps of each run; default: 40")  # fmt: skip
    add("--gpu", action="store_true", help="train on the GPUs of this machine, not on its CPUs")
    add("--jobs", type=whole(1), metavar="N",
        help=f"programs at once; default: one for two processors, up to {MOST_JOBS}")  # fmt: skip
    add("--timeout-s", type=whole(1), default=600, metavar="S",
        help="seconds after which a program is ended; default: 600")  # fmt: skip
    add("--keep", type=Path, metavar="DIR",
        help="a new folder for the runs, which stays; default: a temporary one")  # fmt: skip
    add("--only", action="append", default=[], metavar="NAME",
        help="a line of the table, such as SIGKILL; may be repeated; default: all")  # fmt: skip
    parser.add_json()
    arguments = parser.parse(argv)
    if arguments.keep and arguments.keep.exists():
        parser.error(f"--keep {arguments.keep}: exists already; name a new folder")
    known = Experiments(Settings((), Path(), Path, ranks=arguments.ranks)).names()
    for name in arguments.only:
        if name not in known:
            parser.error(f"--only {name}: choose from {'; '.join(known)}")
    return arguments


def whole(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number that is at least this."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text}: must be a whole number, at least {least}")
        return int(text)

    return read


def check_command(command: Sequence[str]) -> None:
    """Raise a ConfigError if there is no such command."""
    if not command:
        raise ConfigError(f"{NEEDS_DASHES} samestep verify -- python train.py")
    # A program that cannot be started has no output to show.
    if shutil.which(command[0]) is None:
        raise ConfigError(f"samestep verify: {command[0]}: there is no such command")


def check_gpus() -> int:
    """How many GPUs there are.

    Raises:
        ConfigError: if there is none.
    """
    found = device_option.num_gpus("gpu")
    if not found:
        raise ConfigError("--gpu: this machine has no GPU that torch can use; leave out --gpu")
    return found


def default_jobs(*, on_gpu: bool) -> int:
    """Programs at once: each computes with two threads or ranks, and a GPU is for one of them."""
    if on_gpu:
        return 1
    # More would need the memory of as many programs.
    return max(1, min(MOST_JOBS, environment.cpus_per_rank() // 2))


def make_workplace(folder: Path) -> Path:
    """A folder that looks like the current directory; what a program creates in it stays there."""
    here = Path.cwd()
    # A name such as ../data must lead somewhere too.
    workplace = folder / "place" / (here.name or "root")
    # It exists when the run continues.
    if not workplace.exists():
        workplace.mkdir(parents=True)
        if len(list(here.parent.iterdir())) <= MOST_SIBLINGS:
            link_entries(here.parent, workplace.parent, (here.name,))
        link_entries(here, workplace, LEFT_OUT)
    return workplace


def link_entries(source: Path, target: Path, left_out: Sequence[str]) -> None:
    """Make a link in ``target`` to each entry of ``source``."""
    for entry in source.iterdir():
        # A scratch directory may lie within the current one: a link to it would have no end.
        if entry.name not in left_out and not target.is_relative_to(entry):
            (target / entry.name).symlink_to(entry)


def check_undisturbed(run: Run) -> None:
    """Raise an error if nothing can be verified, because the undisturbed run did not end well.

    Raises:
        ConfigError: if the command is rejected, or trains nothing.
        RunError: if it fails.
    """
    if run.is_whole:
        return
    if run.attempts[0].is_rejection:
        raise ConfigError(f"the command itself is rejected: {run.last.why}")
    # Such as a script that uses lightning.Trainer.
    if run.last.code == 0:
        raise ConfigError(
            "the command has trained nothing with samestep.Trainer; verify needs a program that "
            "calls its fit"
        )
    # Of a traceback the end is what counts.
    said = "\n  ".join(run.last.lines[-LAST_LINES:])
    raise RunError(f"the command fails undisturbed, {run.last.why}; it ends with\n  {said}")


# -- What is printed -------------------------------------------------------------------------------


def show_progress(line: str) -> None:
    """Print a line on stderr: stdout has the table only."""
    print(line, file=sys.stderr, flush=True)


def as_json(cells: Mapping[str, Cell]) -> dict[str, dict[str, object]]:
    """The table as plain values."""
    plain: dict[str, dict[str, object]] = {}
    for name, cell in cells.items():
        plain[name] = {"result": cell.word, "why": cell.why}
        if cell.said:
            plain[name]["note"] = cell.said
        hint = hints.hint_for(name, cell)
        if hint:
            plain[name]["hint"] = hint
        if cell.difference is not None:
            plain[name] |= cell.difference._asdict()
    return plain


def print_table(cells: Mapping[str, Cell], experiments: Experiments, seconds: float) -> None:
    """Print a line for each experiment, and what to look for."""
    print(heading(experiments, seconds))
    print()
    width = max(map(len, cells))
    said: dict[str, list[str]] = {}
    looked_for: dict[str, list[str]] = {}
    for name, cell in cells.items():
        why = cell.why
        if cell.word in (IDENTICAL, DIFFERS):
            why = "; ".join(filter(None, [why, conditions_of(name, experiments)]))
        first = f"  {name:<{width}}  {cell.word:<9}  "
        text = textwrap.fill(first + why, WIDTH, subsequent_indent=" " * len(first))
        print(text.rstrip())
        said.setdefault(cell.said, []).append(name)
        looked_for.setdefault(hints.hint_for(name, cell), []).append(name)
    print_texts("What the run says", said)
    print_texts("What to look for", looked_for)


def conditions_of(name: str, experiments: Experiments) -> str:
    """Under which conditions several ranks were compared; empty for one rank."""
    conditions = []
    # The only line that compares something else than bits.
    if name == experiments.on_ranks and experiments.compared_with:
        conditions.append(f"up to rounding, with {experiments.compared_with}")
    if experiments.adds_in_order and name in (experiments.on_ranks, experiments.ranks_stopped):
        conditions.append("deterministic=True")
    return ", ".join(conditions)


def print_texts(title: str, names_of: dict[str, list[str]]) -> None:
    """Print texts, each once for all lines of the table that it belongs to."""
    names_of.pop("", None)
    if names_of:
        print(f"\n{title}")
    for text, names in names_of.items():
        words = f"{'; '.join(names)}: {text}"
        print(textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="    "))


def heading(experiments: Experiments, seconds: float) -> str:
    """What was verified."""
    settings, run = experiments.settings, experiments.undisturbed
    # A short loader has fewer than were asked for.
    num_batches = len(run.ranks[0].batches)
    steps = max((batch.step for batch in run.ranks[0].batches.values()), default=0) + 1
    where = "GPU" if settings.accelerator == "gpu" else "CPU"
    return (
        f"{shlex.join(settings.command)}: {steps} steps ({num_batches} batches) on the {where}, "
        f"{seconds:.0f} s"
    )
