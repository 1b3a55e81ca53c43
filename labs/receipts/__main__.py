"""Plants causes of a silent difference, kills each program, and writes what the run said.

python -m labs.receipts                  # all, into the table of results.md; six minutes
python -m labs.receipts global file      # those whose name contains one of these texts; no table
python -m labs.receipts --no-table       # all, but change no file

Each program is killed by SIGKILL within its second epoch, and continued. A cause is noticed if one
note says that a repeated step differs, and what. Its twin, the same program with its state in the
checkpoint, must repeat the same steps without a note.
"""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from labs import pages
from labs.command import is_chosen, make_parser
from labs.project import copy_project
from labs.receipts.causes import CAUSES, Cause
from samestep.plugins.receipt_files import DIFFERENT, EQUAL
from samestep.ranks import process
from samestep.run import record
from tests import fork_server
from tests.conftest import ROOT, environment

PROGRAM = Path(__file__).with_name("program.py")
PAGE = Path(__file__).with_name("results.md")
MARKERS = ("<!-- receipts -->\n", "<!-- end of receipts -->")
HEADING = "| the state is in | the note names | with the state in the checkpoint |\n|---|---|---|"
NOTE = re.compile(r"^Note: (step \d+ is repeated) (.*?)(?:, \S+ instead of \S+)?: (.*)$", re.M)
TEMPLATE = "the template: "


class Row(NamedTuple):
    """What a cause and its twin have said; ``wrong`` says what they should not, or should have."""

    name: str
    note: str
    twin: str
    wrong: str = ""


def run(cause: Cause, kind: str, folder: Path, *, in_template: bool) -> subprocess.CompletedProcess:
    """Run a program until it is killed, and again until it ends."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(PROGRAM), cause.name, kind]
    if in_template:
        command = command_of_template(cause, kind, folder)
    variables = environment(RUN_ID="run", PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    for expected in (-signal.SIGKILL, 0):
        done = subprocess.run(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != expected:
            raise RuntimeError(f"{cause.name}: exit {done.returncode}: {done.stderr[-500:]}")
    return done


def command_of_template(cause: Cause, kind: str, folder: Path) -> list[str]:
    """The command of a project that has the program in its configuration."""
    copy_project(folder)
    for group in ("model", "data"):
        node = {"_target_": f"labs.receipts.program.{group}_of", "name": cause.name, "kind": kind}
        (folder / f"configs/{group}/cause.yaml").write_text(yaml.dump(node))
    return [
        sys.executable, "train.py", "model=cause", "data=cause", "trainer.accelerator=cpu",
        "trainer.max_epochs=3", "callbacks.checkpoints.monitor=null", "report=false",
        "+callbacks.killer._target_=labs.receipts.program.Killer",
    ]  # fmt: skip


def examine(cause: Cause, directory: Path, *, in_template: bool = False) -> Row:
    """Run a cause and its twin, and judge what they said."""
    folder = directory / re.sub(r"\W+", "-", f"{TEMPLATE * in_template}{cause.name}")
    wrong = []
    done = run(cause, "lost", folder / "lost", in_template=in_template)
    notes = NOTE.findall(done.stdout)
    (repeat,) = repeats_in(folder / "lost", in_template=in_template)
    if len(notes) != 1 or repeat["result"] != DIFFERENT:
        wrong.append(f"{len(notes)} notes, {repeat['result']}")
    said = "nothing"
    if notes:
        step, what, _ = notes[0]
        said = f"{step.removesuffix(' is repeated')}, {what}"
        if cause.says not in what:
            wrong.append(f"the note is not about {cause.says}")
    done = run(cause, "kept", folder / "kept", in_template=in_template)
    (repeat,) = repeats_in(folder / "kept", in_template=in_template)
    if NOTE.search(done.stdout) or repeat["result"] != EQUAL:
        wrong.append(f"its twin: {repeat['result']}: {repeat['note']}")
    twin = f"{repeat['batches']} batches {repeat['result']}"
    name = f"{TEMPLATE}{cause.name}" if in_template else cause.name
    return Row(name, said, twin, "; ".join(wrong))


def repeats_in(folder: Path, *, in_template: bool) -> list[Any]:
    run_dir = folder / "runs" / "run" if in_template else folder / "run"
    return list(record.read(run_dir).repeats)


def render(rows: Sequence[Row]) -> str:
    """Causes with the same cells share a line."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        names.setdefault((row.note, row.twin), []).append(row.name)
    lines = [HEADING]
    for (note, twin), found in names.items():
        lines.append(f"| {'; '.join(found)} | {note} | {twin} |")
    return "\n".join([*lines, ""])


def read_table(page: str) -> dict[str, tuple[str, str]]:
    """What the note and the twin of each cause say."""
    table = pages.read_table(page, MARKERS)
    _, *lines = re.findall(r"^\| (.*) \|$", table, re.M)
    found = {}
    for line in lines:
        names, note, twin = line.split(" | ")
        for name in names.split("; "):
            found[name] = note, twin
    return found


def main() -> None:
    parser = make_parser("receipts", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of causes")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    args = parser.parse_args()
    chosen = [cause for cause in CAUSES if is_chosen(cause.name, args.names)]
    # The programs start as forks of a process that has imported the libraries.
    fork_server.install(environment())
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(examine, cause, Path(folder)) for cause in chosen]
        # One through Hydra: the rest of the way is the same.
        waiting.append(pool.submit(examine, chosen[0], Path(folder), in_template=True))
        for done in waiting:
            row = done.result()
            print(f"{row.name}: {row.note}; twin: {row.twin} {row.wrong}", flush=True)
            rows.append(row)
    if not args.names and not args.no_table:
        pages.write_table(PAGE, render(rows), MARKERS)
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    process.run(main)
