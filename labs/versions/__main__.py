"""Tries the library beside older versions of torch, Lightning and Python.

python -m labs.versions                  # all environments, into the table of results.md
python -m labs.versions torch2.8         # those with one of these texts in their names
python -m labs.versions --make           # only install them
python -m labs.versions --only canaries  # one part: canaries, core or styles

Each environment gets the canaries, the tests of the core and 20 styles of other people's code. The
results are kept in build/versions, so that the table has those of earlier calls too. uv finds the
interpreters on the PATH, or downloads them; a C compiler makes the stand-ins for CUDA.
"""

import json
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

Results = dict[str, dict[str, tuple[str, float]]]
"""What each part of an environment has counted, and in how many seconds."""

RESULTS = FOLDER / "results.json"
PAGE = ROOT / "labs/versions/results.md"
CANARIES = (
    "library/tests/test_versions.py", "library/tests/plugins/test_needed_names.py",
    "library/tests/test_loops.py", "library/tests/ranks", "library/tests/node",
)  # fmt: skip
CORE = (
    "library/tests/test_trainer.py", "library/tests/test_loops.py",
    "library/tests/plugins/test_fsdp.py",
    "library/tests/callbacks/test_continuing.py", "library/tests/callbacks/test_two_ranks.py",
    "library/tests/callbacks/test_model_checkpoint.py", "library/tests/ranks/test_strategies.py",
    "library/tests/callbacks/test_rank_state.py", "library/tests/callbacks/test_objects.py",
    "library/tests/callbacks/test_best_checkpoint.py", "library/tests/ranks/test_compat.py",
    "library/tests/ranks/test_signals_of_runs.py", "library/tests/node/test_agent.py",
    "library/tests/plugins/test_starting.py", "library/tests/node/test_hung_ranks.py",
    "library/tests/test_lightning_names.py",
)  # fmt: skip
"""Tests of what makes a run the same, without the report, launching and the template."""
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
    parts = [args.only] if args.only else [*PARTS]
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    has_failed = False
    for environment in ENVIRONMENTS:
        if not is_chosen(environment.name, args.names):
            continue
        make(environment)
        print(environment.name, flush=True)
        if args.make:
            continue
        for part in parts:
            started = time.monotonic()
            code, result = run(environment, part)
            has_failed = has_failed or code != 0
            seconds = time.monotonic() - started
            print(f"    {part}: {result}, exit code {code}, {seconds:.0f} s", flush=True)
            results.setdefault(environment.name, {})[part] = result, seconds
            RESULTS.write_text(json.dumps(results, indent=1))
    if not args.make:
        pages.write_table(PAGE, render(results))
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


def render(results: Results) -> str:
    """The table of the page; what was not run yet has a dash."""
    headings = "torch", "Lightning", "Python", *PARTS, "minutes"
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for environment in ENVIRONMENTS:
        found = results.get(environment.name, {})
        lowest = ", the rest as low as allowed" if environment.is_lowest else ""
        cells = [environment.torch, environment.lightning + lowest, environment.python]
        for part in PARTS:
            result, _ = found.get(part, ("-", 0.0))
            cells.append(result)
        minutes = sum(seconds for _, seconds in found.values()) / 60
        lines.append(f"| {' | '.join(cells)} | {minutes:.0f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    process.run(main)
