"""Count the code: how long it is, how dense, and how much of it a newcomer must read.

python -m labs.count_code
"""

import ast
import io
import tokenize
from pathlib import Path

from samestep.ranks import process

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "train.py",
    "src/project",
    "library/src/samestep",
    "scripts",
    "labs",
    "tests",
    "library/tests",
)
PATH_TO_FIRST_STEP = (
    "train.py", "src/project/train.py", "src/project/data.py", "src/project/model.py",
    "src/project/nets/cnn.py",
)  # fmt: skip
"""What one reads from the command to the first optimizer step, in this order."""

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str, nodes: list[ast.AST]) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor a comment, nor documentation."""
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


def count(path: Path) -> list[int]:
    """Files, lines, lines of code, functions, and branches."""
    total = [0] * 5
    for file in [path] if path.is_file() else path.rglob("*.py"):
        text = file.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        functions = sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in nodes)
        code = len(code_lines(text, nodes))
        own = [1, len(text.splitlines()), code, functions, sum(map(branches, nodes))]
        total = [a + b for a, b in zip(total, own, strict=True)]
    return total


def main() -> None:
    print(f"{'':22}{'files':>7}{'lines':>7}{'code':>7}{'functions':>11}{'branches per 10':>17}")
    for name in PACKAGES:
        if (ROOT / name).exists():
            files, lines, code, functions, ways = count(ROOT / name)
            density = 10 * ways / code
            print(f"{name:22}{files:7}{lines:7}{code:7}{functions:11}{density:17.1f}")
    length = sum(len((ROOT / name).read_text().splitlines()) for name in PATH_TO_FIRST_STEP)
    print(f"\nFrom the command to the first step: {length} lines", *PATH_TO_FIRST_STEP, sep="\n")


if __name__ == "__main__":
    process.run(main)
