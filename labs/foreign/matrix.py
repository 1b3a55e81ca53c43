"""Runs a style through the experiments of ``samestep verify``, in a project of the laboratory.

What ``samestep.verify.experiments`` says of a cell counts, and four things more: a cell may only
be announced by a note that the style is expected to cause, so that a table of notes that excuses
too much cannot hide anything; ``samestep evaluate`` must find the metrics of the test again; where
a killed run is identical, it must have found its repeated steps equal; and ``is_per_rank`` excuses
other weights on two ranks.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from labs.foreign.styles.base import Style
from labs.project import copy_project
from library.tests.programs import PATIENCE_S
from samestep.plugins import receipt_files as receipts
from samestep.run import record
from samestep.verify.experiments import (
    ANNOUNCED,
    DIFFERS,
    FAILED,
    IDENTICAL,
    KILLED,
    REJECTED,
    STOPPED,
    UNDISTURBED,
    Cell,
    Experiments,
    Settings,
    slug,
)
from tests.conftest import ROOT, environment, final_metrics

ON_RANKS, RANKS_STOPPED = "2 ranks", f"2 ranks, {STOPPED}"
COLUMNS = (UNDISTURBED, STOPPED, KILLED, ON_RANKS, RANKS_STOPPED)
NOTICED = "noticed"  # by its effect, when the run continues
GOOD = (IDENTICAL, ANNOUNCED, NOTICED, REJECTED)
BASE = [
    "trainer.accelerator=cpu", "trainer.max_epochs=3", "trainer.log_every_n_steps=1",
    "callbacks.checkpoints.monitor=val_loss", "callbacks.checkpoints.mode=min", "report=false",
]  # fmt: skip
OF_WEIGHTS = ("parameter", "buffer", "metric")
"""What ``is_per_rank`` excuses: not other samples, and not ranks that have diverged."""


class Matrix:
    """Runs styles in a project of their own, in ``directory``."""

    def __init__(self, directory: Path, timeout_s: float = PATIENCE_S) -> None:
        self.directory = directory
        self.timeout_s = timeout_s
        copy_project(directory)
        self.variables = environment(PYTHONPATH=f"{directory / 'src'}:{ROOT}")

    def run(self, style: Style, columns: Sequence[str] = COLUMNS) -> dict[str, Cell]:
        """The cells of a row."""
        self.write_configs(style)
        experiments = Experiments(self.settings_of(style))
        cells = experiments.run(columns)
        if cells.get(UNDISTURBED, Cell("")).word == IDENTICAL:
            cells[UNDISTURBED] = self.evaluate_again(experiments.undisturbed.run_dir)
        if cells.get(KILLED, Cell("")).word == IDENTICAL:
            cells[KILLED] = self.judge_receipts(style)
        return {column: judge(style, column, cell) for column, cell in cells.items()}

    def judge_receipts(self, style: Style) -> Cell:
        """Whether the killed run, which is identical, has found its repeated steps equal."""
        place = self.directory / "records" / self.id_of(style) / slug(KILLED) / "runs"
        (path,) = place.glob("*/run.json")
        results = [repeat["result"] for repeat in record.read(path.parent).repeats]
        if results == [receipts.EQUAL]:
            return Cell(IDENTICAL)
        return Cell(DIFFERS, f"identical, but the comparison of repeated steps says {results}")

    def settings_of(self, style: Style) -> Settings:
        """The run as a user would start it, with its own limits: it is short."""
        name = self.id_of(style)
        command = [
            sys.executable, "train.py", f"model={name}", f"data={name if style.data else 'null'}",
            *BASE, *style.overrides,
        ]  # fmt: skip
        return Settings(
            command=command,
            directory=self.directory / "records" / name,
            make_workplace=lambda name: self.directory,
            num_steps=None,
            timeout_s=self.timeout_s,
            again=False,
            in_double=style.in_double,
            with_results=True,
            variables=self.variables,
        )

    def write_configs(self, style: Style) -> None:
        """The YAML files that a user would write."""
        name = self.id_of(style)
        for group, kind in (("model", style.model), ("data", style.data)):
            if kind is not None:
                path = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
                node = {"_target_": path}
                (self.directory / f"configs/{group}/{name}.yaml").write_text(yaml.dump(node))

    @staticmethod
    def id_of(style: Style) -> str:
        return re.sub(r"\W+", "-", style.name).strip("-").lower()

    def evaluate_again(self, run_dir: Path) -> Cell:
        """Whether ``samestep evaluate`` finds the metrics of the test, to the last bit."""
        metrics = final_metrics(run_dir)
        tested = [name for name in metrics if name.startswith("test")]
        if not tested:
            return Cell(IDENTICAL)
        done = subprocess.run(
            [sys.executable, "-m", "samestep", "evaluate", str(run_dir), "--format=json"],
            cwd=self.directory, env=self.variables, timeout=self.timeout_s, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return Cell(FAILED, f"evaluate: {(done.stderr.strip().splitlines() or [''])[-1]}")
        found = json.loads(done.stdout)
        wrong = []
        for name in tested:
            if metrics[name] != found.get(name):
                wrong.append(f"{name} {metrics[name]}, evaluate {found.get(name)}")
        return Cell(DIFFERS, "; ".join(wrong)) if wrong else Cell(IDENTICAL)


def judge(style: Style, column: str, cell: Cell) -> Cell:
    """The cell as the laboratory sees it."""
    if cell.word == ANNOUNCED and cell.note not in style.told:
        assert cell.difference is not None
        return Cell(DIFFERS, f"{cell.difference.text}; unexpectedly excused: {cell.why}")
    if cell.word == DIFFERS and cell.note in style.told:
        return cell._replace(word=NOTICED)
    is_on_ranks = column == ON_RANKS and style.is_per_rank
    if is_on_ranks and cell.difference is not None and cell.difference.kind in OF_WEIGHTS:
        return Cell(IDENTICAL)
    return cell
