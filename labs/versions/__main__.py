"""Tries the library beside older versions of torch, Lightning and Python.

python -m labs.versions                  # all environments, into the table of docs/install.md
python -m labs.versions torch2.8         # those with one of these texts in their names; no table
python -m labs.versions --make           # only install them
python -m labs.versions --only canaries  # one part: canaries, core or styles; no table

Each environment gets the canaries, the tests of the core and 20 styles of other people's code. It
takes some ten minutes, after as many for its installation. uv finds the interpreters on the PATH,
or downloads them; a C compiler makes the stand-ins for CUDA.
"""

import re
import subprocess
import sys
import time
from collections.abc import Mapping

from labs import pages
from labs.command import is_chosen, make_parser
from labs.versions.environments import ENVIRONMENTS, FOLDER, Environment, make
from samestep.ranks import process
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "install.md"
CANARIES = (
    "library/tests/test_versions.py",
    "library/tests/ranks",
    "library/tests/test_loops.py",
    "library/tests/node",
)
CORE = (
    "library/tests/test_trainer.py", "library/tests/test_loops.py", "library/tests/callbacks",
    "library/tests/ranks", "library/tests/test_sharded.py", "library/tests/test_lightning_names.py",
)  # fmt: skip
"""The tests of what makes a run the same, without the report, launching and the template."""
STYLES = (
    "GAN: manual", "two optimizers that alternate", "LBFGS", "closure called twice",
    "gradient_clip_val", "ReduceLROnPlateau by epoch", "OneCycleLR", "EarlyStopping",
    "BackboneFinetuning", "ModelCheckpoint of the user", "callback with a state in", "batch norm",
    "dropout", "bf16-mixed", "val_check_interval", "max_steps within", "torchmetrics, logged",
    "accumulate_grad_batches, DataLoader", "loader with a state", "running mean as a buffer",
)  # fmt: skip
"""Texts in the names of 20 styles, some of every kind."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "canaries": ("-m", "pytest", "-q", "-n", "2", "-k", "canary", *CANARIES),
    "core": ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *CORE),
    "styles": ("-m", "labs.foreign", "--no-table", *STYLES),
}
"""What is run in each environment, by Python."""


def main() -> None:
    parser = make_parser("versions", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of environments")
    parser.add_argument("--make", action="store_true", help="only install the environments")
    parser.add_argument("--only", choices=PARTS, help="one part")
    args = parser.parse_args()
    chosen = [found for found in ENVIRONMENTS if is_chosen(found.name, args.names)]
    parts = [args.only] if args.only else [*PARTS]
    rows: list[str] = []
    has_failed = False
    for environment in chosen:
        make(environment)
        print(environment.name, flush=True)
        if args.make:
            continue
        results: list[str] = []
        started = time.monotonic()
        for part in parts:
            code, result = run(environment, part)
            has_failed = has_failed or code != 0
            results.append(result)
            print(f"    {part}: {result}, exit code {code}", flush=True)
        rows.append(row_of(environment, results, time.monotonic() - started))
    if not (args.names or args.make or args.only):
        pages.write_table(PAGE, render(rows))
    sys.exit(has_failed)


def run(environment: Environment, part: str) -> tuple[int, str]:
    """Run one part; returns its exit code and its last line, which counts."""
    log = FOLDER / f"{environment.name}-{part}.txt"
    with log.open("w") as output:
        code = subprocess.run(
            [environment.interpreter, *PARTS[part]], cwd=ROOT, stdout=output, stderr=output
        ).returncode
    *_, last = ["it printed nothing", *log.read_text().split("\n")[:-1]]
    return code, counts_of(last)


def counts_of(line: str) -> str:
    """The counts in the last line of pytest or of ``labs.foreign``, without the seconds."""
    return re.sub(r"( in|;) [\d.]+ ?s.*", "", line.strip("= "))


def row_of(environment: Environment, results: list[str], seconds: float) -> str:
    """A row of the table."""
    lowest = ", the rest as low as allowed" if environment.is_lowest else ""
    cells = environment.torch, environment.lightning + lowest, environment.python, *results
    return f"| {' | '.join(cells)} | {seconds / 60:.0f} min |"


def render(rows: list[str]) -> str:
    """The table of the page."""
    headings = "torch", "Lightning", "Python", *PARTS, "time"
    return "\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *rows, ""])


if __name__ == "__main__":
    process.run(main)
