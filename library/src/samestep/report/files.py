"""What a run directory holds, read with care: a file that is damaged is named, and left out."""

import base64
import csv
import mimetypes
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import ConfigError
from samestep.run import metrics, record
from samestep.run.changes import flatten, read_config
from samestep.run.metrics import read_figures, read_history, why_damaged

MAX_ROWS = 100  # of a table in the predictions folder; longer ones are for programs
MAX_TEXT = 20_000  # characters of a text file there
MAX_BYTES = 2_300_000  # of all pictures together, so that the page stays below 3 MB
PICTURES = {".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp"}


class Run(NamedTuple):
    """One run, as far as its files can be read."""

    run_dir: Path
    config: dict[str, Any]
    """The saved configuration; empty if it cannot be read."""
    figures: dict[str, float | None]
    """``metrics.json``; empty until the run is finished, also if it was finished before."""
    rows: list[dict[str, float]]
    """``metrics.csv``."""
    status: record.Record
    """``run.json``: how far the run is, its starts and ends."""
    problems: list[str]
    """What is missing or damaged, one sentence each."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run_dir.absolute().name

    @property
    def values(self) -> dict[str, Any]:
        """The configuration with full keys: ``{"trainer.max_epochs": 20}``."""
        return flatten(self.config)

    @property
    def num_epochs(self) -> int:
        """Epochs that were trained."""
        return metrics.count_epochs(self.rows)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were trained."""
        return metrics.count_steps(self.rows)

    @property
    def speeds(self) -> dict[str, float]:
        """The median of each speed, such as ``{"samples/s": 5000.0}``."""
        return metrics.speeds(self.rows)


class Shown(NamedTuple):
    """A file of the predictions folder, ready for the page."""

    title: str
    kind: str
    """picture, table, text or note."""
    text: str = ""
    """Of a picture its description, of a note or a text the text itself."""
    source: str = ""
    """Of a picture: a ``data:`` address with its content."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Of a table: its lines, the heading first."""


def read_run(run_dir: Path) -> Run:
    """Read all that a report shows of a run, except for the predictions."""
    problems: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = read_config(run_dir)
    except (ConfigError, OSError) as error:
        problems.append(f"config.yaml: {error}")
    status = record.read(run_dir)
    rows = read_history(run_dir)
    if why := why_damaged(run_dir):
        problems.append(f"metrics.csv is damaged: {why}")
    elif not rows:
        problems.append("metrics.csv holds no metric yet: there are no curves")
    figures = read_figures(run_dir)
    if figures is None:
        is_there = (run_dir / "metrics.json").exists()
        what = "is damaged" if is_there else f"is absent: the run is {status.state}"
        problems.append(f"metrics.json {what}, so there are no final figures")
    elif status.state != record.FINISHED:
        problems.append(
            "metrics.json and predictions hold what the run had reached before it was continued: "
            f"the run is {status.state}, so there are no final figures"
        )
        figures = None
    if not status.starts:
        problems.append("run.json is absent or damaged: machine, command and starts are unknown")
    return Run(run_dir, config, numbers(figures or {}), rows, status, problems)


def numbers(figures: dict[str, Any]) -> dict[str, float | None]:
    """Those of the figures that are numbers; null stands for nan and infinity."""
    return {
        name: value
        for name, value in figures.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def command_of(attempt: Mapping[str, Any]) -> str:
    """The command line of a start, as it can be typed."""
    command = attempt.get("command")
    return shlex.join(["python", *map(str, command)]) if isinstance(command, list) else ""


def timeline(run: Run) -> list[dict[str, str]]:
    """Starts and ends in order of their time; a start that left no end was killed."""
    events = [
        {"time": str(attempt.get("started", "")), "what": "started" if not n else "continued",
         "details": f"{attempt.get('world_size', '?')} rank(s), {attempt.get('hostname', '?')}: "
         f"{command_of(attempt)}"}
        for n, attempt in enumerate(run.status.starts)
    ]  # fmt: skip
    for end in run.status.ends:
        step = "" if end.get("step") is None else f"after step {end['step']}"
        details = ", ".join(filter(None, (step, str(end.get("why", "")))))
        events.append(
            {"time": str(end.get("time", "")), "what": str(end.get("state", "")),
             "details": details}
        )  # fmt: skip
    # Sorting is stable, and a start that comes within the same second as an end comes after it.
    events.sort(key=lambda event: (_instant(event["time"]), event["what"] == "continued"))
    return list(_with_kills(events, run.status))


def _with_kills(events: list[dict[str, str]], status: record.Record) -> Iterator[dict[str, str]]:
    """The events, and between two starts without an end a line that says so."""
    is_open = False
    for event in events:
        is_start = event["what"] in ("started", "continued")
        if is_start and is_open:
            yield {"time": "", "what": record.STOPPED, "details": record.KILLED}
        yield event
        is_open = is_start
    if is_open and status.state == record.STOPPED:
        yield {"time": "", "what": record.STOPPED, "details": record.KILLED}


def _instant(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def read_predictions(run_dir: Path) -> list[Shown]:
    """Every picture, table and text in the predictions folder, in order of the names.

    A text file with the name of a picture, such as ``grid.txt`` beside ``grid.png``, describes it:
    its first line is the title, the others say what the picture shows.
    """
    folder = run_dir / "predictions"
    paths = sorted(path for path in folder.glob("[!.]*") if path.is_file())
    described = {path.stem for path in paths if path.suffix in PICTURES}
    left = MAX_BYTES
    shown = []
    for path in paths:
        if path.suffix == ".txt" and path.stem in described:
            continue
        try:
            item = _show(path, left)
        except (OSError, ValueError, csv.Error) as error:
            item = Shown(title_of(path), "note", f"{path.name} cannot be read: {error}")
        if item:
            shown.append(item)
            left -= len(item.source)
    return shown


def _show(path: Path, left: int) -> Shown | None:
    """One file, or None if the page does not show such files."""
    title = title_of(path)
    if path.suffix in PICTURES:
        return _picture(path, title, left)
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            rows = [tuple(row) for row in csv.reader(file)]
        if len(rows) > MAX_ROWS + 1:
            return Shown(title, "note", f"{path.name} has {len(rows) - 1:,} rows; open the file")
        return Shown(title, "table", rows=tuple(rows))
    if path.suffix in (".txt", ".md"):
        text = path.read_text(encoding="utf-8", errors="replace")
        cut = "" if len(text) <= MAX_TEXT else f"\n... {len(text) - MAX_TEXT:,} more characters"
        return Shown(title, "text", text[:MAX_TEXT] + cut)
    return None


def _picture(path: Path, title: str, left: int) -> Shown:
    size = path.stat().st_size * 4 // 3
    if size > left:
        return Shown(title, "note", f"{path.name} is too large for this page: open the file")
    description = path.with_suffix(".txt")
    text = description.read_text(errors="replace").strip() if description.is_file() else ""
    first, _, rest = text.partition("\n")
    title = first or title
    return Shown(title, "picture", rest or title, data_address(path.read_bytes(), path.name))


def data_address(content: bytes, name: str) -> str:
    """A picture as an address that holds its own content, so that the page needs no other file."""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def title_of(path: Path) -> str:
    """``confusion_matrix.png`` as ``Confusion matrix``."""
    words = path.stem.replace("_", " ").replace("-", " ").strip()
    return words[:1].upper() + words[1:]
