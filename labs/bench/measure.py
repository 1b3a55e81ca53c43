"""Fresh processes in turn, the gate, and what their numbers say about each other."""

import json
import operator
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = "RESULT "
"""Begins the line in which a contender says what it measured, as JSON."""

TOLERANCE = 1e-3  # of a loss; another order of the images changes it a hundred times more
MOST_S = 600  # that a contender may take
STACKS_S = 2  # in which one that hangs can write its stacks
BUSY = 0.1  # share of the processors that others may use before the table says so


@dataclass
class Row:
    """One workload: contenders that do the same work, and what is claimed of them."""

    name: str
    title: str
    contenders: dict[str, str]
    """What follows ``python`` in the command line of each."""
    claims: list[str]
    """Such as ``ours / bare <= 1.4``, ``ours - bare``, or ``ours <= 3``."""
    unit: str = ""
    """Of the claims that are no ratio."""
    prepare: Callable[[], object] = lambda: None
    needs_gpu: bool = False
    lacks: str = ""
    """Why it cannot be measured here, such as ``no server built``."""


def judge(claim: str, repeats: list[dict[str, float]]) -> tuple[list[float], str]:
    """The value of a claim in each repeat, and whether their median is within its limit.

    The verdict is empty where there is no limit.
    """
    names, _, limit = re.fullmatch(r"(.*?)( [<>]= (.+))?", claim).groups()
    name, sign, other = [*names.split(), "", ""][:3]
    operation = {"/": operator.truediv, "-": operator.sub, "": lambda value, _: value}[sign]
    values = [operation(numbers[name], numbers.get(other)) for numbers in repeats]
    if limit is None:
        return values, ""
    is_met = median(values) <= float(limit) if "<=" in claim else median(values) >= float(limit)
    return values, "yes" if is_met else "**no**"


def environment(started: float, tree: Path = ROOT) -> dict[str, str]:
    """That of a contender: one thread, nothing that names a run, and when it was started."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RUN_ID", "WANDB", "MLFLOW"))}
    folders = [tree, tree / "src", tree / "library/src", os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, folders))
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return kept | ours | {"BENCH_STARTED": repr(started), "PYTHONWARNINGS": "ignore"}


def run(command: str, tree: Path = ROOT) -> dict[str, Any]:
    """Run a contender; its result, or how many seconds it took if it gives none.

    ``tree`` is the checkout that it measures: this one, or another one with its ``.venv``.

    Raises:
        RuntimeError: if it fails, or takes longer than ``MOST_S``.
    """
    # Files, because a pipe is open until the last process ends that a contender has left behind.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.time()
        python = sys.executable if tree == ROOT else tree / ".venv/bin/python"
        contender = subprocess.Popen(
            [python, *shlex.split(command)], cwd=tree, env=environment(started, tree),
            stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            exit_code: int | str = contender.wait(MOST_S)
        except subprocess.TimeoutExpired:
            exit_code = f"nothing after {MOST_S} s"
            ask_for_stacks(contender)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(contender.pid, signal.SIGKILL)
            contender.wait()
        elapsed = time.time() - started
        said, complaints = (file.seek(0) or file.read() for file in (output, errors))
    lines = [line for line in said.splitlines() if line.startswith(RESULT)]
    if lines and isinstance(exit_code, str):
        # It hung when all was done, which its number does not tell.
        print(f"{command} had to be killed: {stacks_of(complaints)}", file=sys.stderr, flush=True)
    if lines:
        return dict(json.loads(lines[-1].removeprefix(RESULT)))
    if exit_code not in (0, 2):  # a config error is a contender too
        raise RuntimeError(f"{command} ended with {exit_code}: {stacks_of(complaints)}")
    return {"value": elapsed}


def ask_for_stacks(contender: subprocess.Popen[bytes]) -> None:
    """Let a contender that hangs write where; one that does not know the signal ends."""
    contender.send_signal(signal.SIGQUIT)
    with suppress(subprocess.TimeoutExpired):
        contender.wait(STACKS_S)


def stacks_of(complaints: str) -> str:
    """What matters of a long output: the stacks of all threads, otherwise its end."""
    head, begin, stacks = complaints.partition("Thread 0x")
    if not begin:
        head, begin, stacks = complaints.partition("Current thread 0x")
    return f"{head[-500:]}{begin}{stacks}" if begin else complaints[-2000:]


def measure(row: Row, repeats: int) -> dict[str, Any]:
    """All contenders in turn, each second time backwards: A B B A.

    Returns:
        ``numbers`` of each repeat by contender, ``peak_mib`` of each contender, how ``busy`` other
        programs kept the processors meanwhile, and why the numbers do not count (``wrong``).
    """
    row.prepare()
    numbers, wrong, begin = [], "", processor_seconds()
    peak_mib = dict.fromkeys(row.contenders, 0.0)
    for repeat in range(repeats):
        names = list(row.contenders)
        in_turn = names if repeat % 2 == 0 else names[::-1]
        results = {name: run(row.contenders[name]) for name in in_turn}
        numbers.append({name: results[name]["value"] for name in names})
        for name in names:
            peak_mib[name] = max(peak_mib[name], results[name].get("peak_mib", 0.0))
        wrong = wrong or gate({name: results[name] for name in names})
        print(f"  {row.name} {repeat + 1}/{repeats}", file=sys.stderr, flush=True)
    passed, by_others = (b - a for a, b in zip(begin, processor_seconds(), strict=True))
    return {"numbers": numbers, "peak_mib": peak_mib, "busy": by_others / passed, "wrong": wrong}


def gate(results: dict[str, dict[str, Any]]) -> str:
    """Which contender has other losses than the first one; empty if none has.

    Contenders of one recipe give their first losses as ``curve``. The others give none.
    """
    curves = {name: result["curve"] for name, result in results.items() if "curve" in result}
    first = next(iter(curves), "")
    if len(curves) == 1:
        return f"{first} has a loss curve, and no other contender has one"
    for name, curve in curves.items():
        # A nan is near nothing.
        near = [abs(a - b) <= TOLERANCE for a, b in zip(curves[first], curve, strict=False)]
        if not near or not all(near) or len(curve) != len(curves[first]):
            return f"{name} has another loss curve than {first}: {curve} and {curves[first]}"
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


def lines_of(row: Row, measured: dict[str, Any]) -> list[list[str]]:
    """What the table says of a row, a line for each claim."""
    peaks = ", ".join(f"{name} {peak:.0f}" for name, peak in measured["peak_mib"].items() if peak)
    n = str(len(measured["numbers"]))
    if measured["busy"] > BUSY:
        n += f" (busy: {measured['busy']:.0%})"
    lines = []
    for claim in row.claims:
        values, met = judge(claim, measured["numbers"])
        low, high = interval(values)
        unit = "" if " / " in claim or not row.unit else f" {row.unit}"
        number = f"{median(values):.3g}{unit} ({low:.3g} to {high:.3g})"
        if measured["wrong"]:
            number, met = "does not count: other losses", "**no**"
        lines.append([row.title, f"{claim}{unit}", number, n, met, peaks])
    return lines


def say(**result: object) -> None:
    """Give the harness a result, with the most memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(RESULT + json.dumps({"peak_mib": int(peak.split()[1]) / 1024} | result), flush=True)
