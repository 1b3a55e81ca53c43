"""Where the wall time of runs went, summed up: goodput, hours of devices, repeated steps."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from samestep.plugins.time_file import CAUSES, count_repeated_steps, read_starts
from samestep.run import record
from samestep.run.phases import AWAY, TRAINING

HOUR_S = 3600
PARTS = "percent of the seconds"
NARROW_HEADING = ("run", "seconds", "goodput", PARTS)
HEADING = ("run", "seconds", "goodput", "repeated steps", "hours", *CAUSES, AWAY)


class Account(NamedTuple):
    """The wall time of one run, or of several."""

    seconds: dict[str, float]
    """By cause, away included; empty if nothing is known."""
    repeated_steps: int = 0
    gpu_hours: float = 0.0
    """Of all ranks, while they had their devices."""
    process_hours: float = 0.0
    """Of all ranks without a GPU."""

    @property
    def total_s(self) -> float:
        """From the first start to the last end, or until now; of several runs the sum."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the time in which steps were trained for the first time."""
        # A run without an account, or one that has just begun.
        if not self.total_s:
            return 0.0
        return self.seconds[TRAINING] / self.total_s

    def percent(self) -> dict[str, float]:
        """The causes that took time, in percent of all."""
        found = {}
        for cause, seconds in self.seconds.items():
            # Most runs never compile, and many never search for a checkpoint.
            if seconds > 0:
                found[cause] = 100 * seconds / self.total_s
        return found

    def hours(self) -> str:
        """The hours of GPUs, and of processes without one."""
        texts = []
        if self.gpu_hours:
            texts.append(f"{self.gpu_hours:.3g} GPU")
        if self.process_hours:
            texts.append(f"{self.process_hours:.3g} process")
        return " + ".join(texts)

    def plain(self) -> dict[str, object]:
        """The account for a program."""
        return {**self._asdict(), "total_s": self.total_s, "goodput": self.goodput}


def account_of(run_dir: Path, known: record.Record) -> Account:
    """The account of a run, of which ``known`` is the record."""
    starts = read_starts(run_dir, known.starts)
    if not starts:
        return Account({})
    seconds = dict.fromkeys((*CAUSES, AWAY), 0.0)
    gpu_hours = process_hours = 0.0
    for start in starts:
        for cause, spent in start.seconds.items():
            seconds[cause] += spent
        seconds[AWAY] += start.away
        # Ranks wait for each other, so each has its device as long as the run.
        # Also while it imports, waits or stops: nobody else has the device then.
        hours = start.num_ranks * (start.ended - start.began) / HOUR_S
        if start.device == "cpu":
            process_hours += hours
        else:
            gpu_hours += hours
    repeated_steps = count_repeated_steps(starts)
    return Account(seconds, repeated_steps, gpu_hours, process_hours)


def add_up(accounts: Iterable[Account]) -> Account:
    """One account of several runs."""
    total = Account({})
    for account in accounts:
        # A run of an earlier version has no seconds, so the causes are those met so far.
        seconds = dict(total.seconds)
        for cause, spent in account.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + spent
        total = Account(
            seconds,
            total.repeated_steps + account.repeated_steps,
            total.gpu_hours + account.gpu_hours,
            total.process_hours + account.process_hours,
        )
    return total


def narrow_cells_of(name: str, account: Account) -> tuple[str, ...]:
    """The cells of an account, one for each column of ``NARROW_HEADING``."""
    if not account.seconds:
        return (name, "", "", "")
    percent = account.percent()
    parts = []
    for cause in sorted(percent, key=lambda cause: -percent[cause]):
        text = f"{percent[cause]:.1f}"
        if text != "0.0":
            parts.append(f"{cause} {text}")
    goodput = f"{100 * account.goodput:.1f} %"
    return name, f"{account.total_s:,.0f}", goodput, ", ".join(parts)


def cells_of(name: str, account: Account) -> tuple[str, ...]:
    """The cells of an account, one for each column of ``HEADING``."""
    # A run of an earlier version has no account.
    if not account.seconds:
        return (name, *[""] * (len(HEADING) - 1))
    percent = account.percent()
    causes = []
    for cause in (*CAUSES, AWAY):
        causes.append(f"{percent[cause]:.1f}" if cause in percent else "")
    return (
        name,
        f"{account.total_s:,.0f}",
        f"{100 * account.goodput:.1f} %",
        str(account.repeated_steps),
        account.hours(),
        *causes,
    )
