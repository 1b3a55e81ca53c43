"""Count the code: how long it is, how dense, and how much of it a newcomer must read.

python -m tests.count_code             # the working tree
python -m tests.count_code d6c206e     # any revision of git
"""

import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from samestep.ranks import process

ROOT = Path(__file__).parents[1]
PACKAGES = ("train.py", "src/project", "library/src/samestep", "scripts", "tests")
MOST_COMPLEX = 10  # ruff's C901: the most branches that a function may have

PATH_TO_FIRST_STEP = (
    "train.py", "src/project/train.py", "src/project/data/datamodule.py",
    "src/project/model/classifier.py", "src/project/model/nets/cnn.py",
)  # fmt: skip
"""What one reads from the command to the first optimizer step, in this order."""

PATH_WITH_ONE_PACKAGE = (
    "train.py", "src/project/train.py", "src/project/build.py", "src/project/data.py",
    "src/project/classifier.py", "src/project/nets/cnn.py",
)  # fmt: skip
"""The same path in revisions before the library."""

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


@dataclass
class Count:
    """Figures of one file, or the sum of several."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0  # without blank lines, comments and docstrings
    functions: int = 0
    branches: int = 0  # conditions, loops, handlers, and/or, comprehensions
    comments: int = 0  # on a line of their own

    def __add__(self, other: "Count") -> "Count":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Count(*(a + b for a, b in pairs))


def count_file(path: Path) -> Count:
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [t for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip()[:1] == "#"]
    return Count(
        files=1,
        lines=len(text.splitlines()),
        code_lines=len(code_lines(text, nodes)),
        functions=len(functions),
        branches=sum(map(branches, nodes)),
        comments=len(comments),
    )


def code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    """Numbers of the lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        # A string that nothing is done with is documentation.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return found


def branches(node: ast.AST) -> int:
    """How many ways out of the straight line a node adds."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))


def count_complex(folder: Path) -> int:
    """Number of functions that ruff refuses as too complex."""
    done = subprocess.run(
        [
            sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=C901",
            f"--config=lint.mccabe.max-complexity={MOST_COMPLEX}", "--output-format=json",
            str(folder),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return len(json.loads(done.stdout))


def rows(root: Path) -> Iterator[tuple[object, ...]]:
    """One row for each package that this revision has."""
    for name in PACKAGES:
        path = root / name
        if not path.exists():
            continue
        files = [path] if path.is_file() else path.rglob("*.py")
        count = sum(map(count_file, files), Count())
        density = 10 * count.branches / count.code_lines
        yield (
            name, count.files, count.lines, count.code_lines, count.functions,
            count_complex(path), f"{density:.1f}", count.comments,
        )  # fmt: skip


def report(root: Path) -> str:
    heads = (
        "", "files", "lines", "code lines", "functions", f"C901 > {MOST_COMPLEX}",
        "branches per 10", "comment lines",
    )  # fmt: skip
    lines = [
        f"{row[0]:14}" + "".join(f"{cell:>{len(head) + 2}}" for head, cell in columns)
        for row in (heads, *rows(root))
        for columns in [zip(heads[1:], map(str, row[1:]), strict=True)]
    ]
    is_old = (root / "src/project/build.py").exists()
    path = PATH_WITH_ONE_PACKAGE if is_old else PATH_TO_FIRST_STEP
    length = sum(len((root / name).read_text().splitlines()) for name in path)
    return "\n".join([*lines, "", f"From the command to the first step: {length} lines", *path])


def main() -> None:
    if not sys.argv[1:]:
        print(report(ROOT))
        return
    archive = subprocess.check_output(["git", "archive", sys.argv[1]], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        print(report(Path(folder)))


if __name__ == "__main__":
    process.run(main)
