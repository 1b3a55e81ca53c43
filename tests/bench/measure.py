"""Fresh processes in turn, the gate, and what their numbers say about each other."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
"""Begins the line in which a contender says what it measured, as JSON."""

TOLERANCE = 1e-3  # of a loss; another order of the images changes it a hundred times more
BUSY = 0.1  # share of the processors that others may use before the table says so
Numbers = dict[str, float]  # of one repeat, by contender


@dataclass
class Row:
    """One workload: contenders that do the same work, and what is claimed of them."""

    name: str
    title: str
    contenders: dict[str, list[str]]
    """The words after ``python`` that start each of them."""
    claims: list[str]
    """Such as ``ours / bare <= 1.4``, ``ours - bare``, or ``ours <= 3``."""
    unit: str = ""
    """Of the claims that are no ratio."""
    prepare: Callable[[], object] = lambda: None
    same_curve: tuple[str, ...] = ()
    """Contenders whose losses must be equal, or their numbers do not count."""
    needs_gpu: bool = False


@dataclass
class Measured:
    """The repeats of one row."""

    numbers: list[Numbers] = field(default_factory=list)
    peak_mib: Numbers = field(default_factory=dict)
    busy: float = 0.0  # share of the processors that other programs used meanwhile
    wrong: str = ""  # why the numbers do not count


def value_of(claim: str, numbers: Numbers) -> float:
    """What a claim is about, in one repeat."""
    name, *rest = claim.split()
    if rest[:1] == ["/"]:
        return numbers[name] / numbers[rest[1]]
    if rest[:1] == ["-"]:
        return numbers[name] - numbers[rest[1]]
    return numbers[name]


def verdict(claim: str, value: float) -> str:
    """Whether a claim is met; nothing where it has no limit."""
    sign, limit = claim.split()[-2:] if "=" in claim else ("", "")
    if not sign:
        return ""
    is_met = value <= float(limit) if sign == "<=" else value >= float(limit)
    return "yes" if is_met else "**no**"


def environment(started: float) -> dict[str, str]:
    """That of a contender: one thread, nothing that names a run, and when it was started."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RUN_ID", "WANDB", "MLFLOW"))}
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    return kept | ours | {"BENCH_STARTED": repr(started), "PYTHONWARNINGS": "ignore"}


def run(words: list[str], timeout: float = 600) -> dict[str, object]:
    """Run a contender; its result, or how many seconds it took if it gives none."""
    started = time.time()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment(started), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        said, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    elapsed = time.time() - started
    lines = [line for line in said.splitlines() if line.startswith(RESULT)]
    if lines:
        return dict(json.loads(lines[-1].removeprefix(RESULT)))
    if process.returncode not in (0, 2):  # a config error is a contender too
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {errors[-2000:]}")
    return {"value": elapsed}


def measure(row: Row, repeats: int) -> Measured:
    """All contenders in turn, each second time backwards: A B B A."""
    measured = Measured()
    row.prepare()
    begin = processor_seconds()
    for repeat in range(repeats):
        names = list(row.contenders)
        results = {}
        for name in names if repeat % 2 == 0 else reversed(names):
            results[name] = run(row.contenders[name])
        measured.numbers.append({name: float(str(results[name]["value"])) for name in names})
        for name in names:
            peak = float(str(results[name].get("peak_mib", 0)))
            measured.peak_mib[name] = max(measured.peak_mib.get(name, 0), peak)
        measured.wrong = measured.wrong or gate(row, results)
        print(f"  {row.name} {repeat + 1}/{repeats}", file=sys.stderr, flush=True)
    passed, by_others = (b - a for a, b in zip(begin, processor_seconds(), strict=True))
    measured.busy = by_others / passed
    return measured


def gate(row: Row, results: dict[str, dict[str, object]]) -> str:
    """Which contender has other losses than the first one of its recipe; empty if none has."""
    curves = {name: results[name]["curve"] for name in row.same_curve}
    for name, curve in curves.items():
        first = curves[row.same_curve[0]]
        pairs = list(zip(first, curve, strict=False))
        # A nan is near nothing.
        near = [abs(a - b) <= TOLERANCE for a, b in pairs]
        if not all(near) or len(first) != len(curve) or not pairs:
            return f"{name} has another loss curve than {row.same_curve[0]}: {curve} and {first}"
    return ""


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """A bootstrap interval of 95 % of the median."""
    random_numbers = random.Random(0)
    medians = sorted(median(random_numbers.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def processor_seconds() -> tuple[float, float]:
    """Seconds that passed on all processors, and those in which other programs worked."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    idle, per_second = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])  # of this process, and of the contenders that have ended
    return sum(ticks) / per_second, (sum(ticks) - idle) / per_second - own


def lines_of(row: Row, measured: Measured) -> list[list[str]]:
    """What the table says of a row, a line for each claim."""
    peaks = [f"{name} {peak:.0f}" for name, peak in measured.peak_mib.items() if peak]
    n = str(len(measured.numbers))
    if measured.busy > BUSY:
        n += f" (busy: {measured.busy:.0%})"
    lines = []
    for claim in row.claims:
        values = [value_of(claim, numbers) for numbers in measured.numbers]
        middle, (low, high) = median(values), interval(values)
        unit = "" if " / " in claim or not row.unit else f" {row.unit}"
        number, met = f"{middle:.3g}{unit} ({low:.3g} to {high:.3g})", verdict(claim, middle)
        if measured.wrong:
            number, met = "does not count: other losses", "**no**"
        lines.append([row.title, f"{claim}{unit}", number, n, met, ", ".join(peaks)])
    return lines


def started() -> float:
    """When the harness started this process, in seconds of the clock."""
    return float(os.environ["BENCH_STARTED"])


def say(**result: object) -> None:
    """Give the harness a result, with the most memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(RESULT + json.dumps({"peak_mib": int(peak.split()[1]) / 1024} | result), flush=True)
