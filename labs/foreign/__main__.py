"""Runs the matrix of foreign styles: tables in labs/foreign/results.md, summary in docs/foreign.md.

python -m labs.foreign                    # every style, into the table; about 13 minutes
python -m labs.foreign --libraries        # the styles of real libraries, into a table of their own
python -m labs.foreign --summary          # only the summary, from the tables that there are
python -m labs.foreign GAN "batch norm"   # those whose name contains one of these texts; no table
python -m labs.foreign --jobs 4           # so many programs at once; 2 without it
python -m labs.foreign --rows FILE        # resume: styles with good cells in FILE are not run again
python -m labs.foreign --keep DIR         # leave the runs in this new folder
python -m labs.foreign --no-table         # every style, but change no file
"""

import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from labs import pages
from labs.command import is_chosen, make_parser
from labs.foreign.matrix import COLUMNS, GOOD, NOTICED, ON_RANKS, Matrix
from labs.foreign.styles import OF_LIBRARIES, STYLES, libraries
from labs.foreign.styles.base import Style
from samestep.ranks import process
from samestep.verify.experiments import (
    ANNOUNCED,
    FAILED,
    IDENTICAL,
    KILLED,
    REJECTED,
    STOPPED,
    Cell,
)
from tests import fork_server
from tests.conftest import ROOT, environment

PAGE = ROOT / "docs" / "foreign.md"
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.md"
MARKERS = ("<!-- libraries -->\n", "<!-- end of libraries -->")
"""Of the table of real libraries."""
NOWHERE = "nowhere"
MOST_NAMES = 20
"""More styles that are identical everywhere are only counted on the page."""


def render(styles: Sequence[Style], words_of: Mapping[str, Sequence[str]]) -> str:
    """A row for each style."""
    lines = [f"| style | {' | '.join(COLUMNS)} | what the run says |", "|---" * 7 + "|"]
    for style in styles:
        words = words_of[style.name]
        lines.append(f"| {style.name} | {' | '.join(words)} | {says(style, words)} |")
    return "\n".join([*lines, ""])


def says(style: Style, words: Sequence[str]) -> str:
    """The notes of a run that is not identical everywhere."""
    if ANNOUNCED not in words and NOTICED not in words:
        return ""
    return "; ".join(note.meaning for note in style.told)


def summarize(styles: Sequence[Style], words_of: Mapping[str, Sequence[str]]) -> str:
    """Styles by what a run says of them, as users look for it."""
    # Most styles come first.
    groups: dict[tuple[str, str], list[str]] = {(NOWHERE, ""): []}
    for style in styles:
        words = words_of[style.name]
        group = where_it_differs(words), says(style, words)
        groups.setdefault(group, []).append(style.name)
    lines = ["| style | differs | what the run says |", "|---|---|---|"]
    for (where, note), names in groups.items():
        # As names they would hide the others.
        named = "; ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} styles"
        lines.append(f"| {named} | {where} | {note} |")
    return "\n".join([*lines, ""])


def where_it_differs(words: Sequence[str]) -> str:
    """Which columns are not identical, in a word or two."""
    word_of = dict(zip(COLUMNS, words, strict=True))
    is_on_ranks = word_of[ON_RANKS] != IDENTICAL
    if REJECTED in words:
        return "*rejected*" if set(words) == {REJECTED} else "*rejected* on two ranks"
    if {ANNOUNCED, NOTICED}.intersection((word_of[STOPPED], word_of[KILLED])):
        return "both" if is_on_ranks else "when resumed"
    return "on two ranks" if is_on_ranks else NOWHERE


def read_table(text: str, markers: tuple[str, str] = pages.MARKERS) -> dict[str, list[str]]:
    """The words of each style."""
    table = pages.read_table(text, markers)
    _, *rows = re.findall(r"^\| (.*) \|$", table, re.M)  # the first row has the headings
    words_of: dict[str, list[str]] = {}
    for row in rows:
        name, *words, _ = row.split(" | ")
        words_of[name] = words
    return words_of


def write_summary() -> None:
    """Write both tables of the page, from the results that are kept."""
    results = RESULTS.read_text()
    pages.write_table(PAGE, summarize(STYLES, read_table(results)))
    table = summarize(OF_LIBRARIES, read_table(results, MARKERS))
    pages.write_table(PAGE, table, MARKERS)


def render_versions() -> str:
    """The libraries that the styles were asked to use, as the lock has them."""
    lock = (FOLDER / "libraries.lock").read_text()
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock, re.M))
    wanted = (FOLDER / "libraries.in").read_text().split()
    return f"Versions: {', '.join(f'{name} {versions[name]}' for name in wanted)}.\n"


def main() -> None:
    parser = make_parser("foreign", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of styles")
    parser.add_argument("--libraries", action="store_true", help="styles of real libraries")
    parser.add_argument("--summary", action="store_true", help="only write the summary")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    parser.add_argument("--rows", type=Path, help="a file to resume from; it gets the new rows")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs")
    args = parser.parse_args()
    if args.summary:
        return write_summary()
    if args.libraries and not libraries.are_installed():
        sys.exit("error: this Python has no litdata; use make -C labs libraries")
    styles = OF_LIBRARIES if args.libraries else STYLES
    chosen = [style for style in styles if is_chosen(style.name, args.names)]
    words_of = read_rows(args.rows)
    waiting = [style for style in chosen if style.name not in words_of]
    # The programs start as forks of a process that has imported the libraries: half of the time.
    fork_server.install(environment())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(args.keep or Path(folder, "project"))
        for name, words in run_all(matrix, waiting, args.jobs):
            words_of[name] = words
            keep_rows(args.rows, words_of)
    counts: Counter[str] = Counter()
    for style in chosen:
        counts.update(words_of[style.name])
    text = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    print(f"{text}; {time.monotonic() - started:.0f} s")
    if not args.names and not args.no_table:
        table = render(styles, words_of)
        if args.libraries:
            pages.write_table(RESULTS, f"{table}\n{render_versions()}", MARKERS)
        else:
            pages.write_table(RESULTS, table)
        write_summary()
    sys.exit(not is_good(counts))


def is_good(words: Iterable[str]) -> bool:
    return set(words) <= set(GOOD)


def read_rows(path: Path | None) -> dict[str, list[str]]:
    """The words of the styles that an earlier command has run."""
    if path is None or not path.exists():
        return {}
    words_of: dict[str, list[str]] = json.loads(path.read_text())
    return words_of


def keep_rows(path: Path | None, words_of: Mapping[str, list[str]]) -> None:
    """Write the rows in which nothing went wrong; the next command runs the others again."""
    if path is None:
        return
    good = {}
    for name, words in words_of.items():
        if is_good(words):
            good[name] = words
    path.write_text(json.dumps(good, indent=1))


def run_all(matrix: Matrix, styles: Sequence[Style], jobs: int) -> Iterator[tuple[str, list[str]]]:
    """The name and the words of each of these styles, printed as they come."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(matrix.run, style): style for style in styles}
        for number, done in enumerate(as_completed(waiting), 1):
            name = waiting[done].name
            try:
                cells = done.result()
            except Exception as error:  # one style must not stop the others
                cells = dict.fromkeys(COLUMNS, Cell(FAILED, repr(error)))
            words = [cells[column].word for column in COLUMNS]
            print(f"{number}/{len(styles)}  {name}  [{', '.join(words)}]", flush=True)
            for column, cell in cells.items():
                if cell.word != IDENTICAL:
                    print(f"    {column}: {cell.word}: {cell.why}", flush=True)
            yield name, words


if __name__ == "__main__":
    process.run(main)
