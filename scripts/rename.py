"""Give the package `project` another name, in a clone of the template that Copier did not make.

python scripts/rename.py pets

It changes the files that git knows, except those of `samestep`, and removes the files that only
Copier reads. Images, volumes and the Python distribution keep the name `project`.
"""

import contextlib
import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import options

from samestep.command_line import Parser
from samestep.errors import RunError

ROOT = Path(__file__).resolve().parents[1]
RULES = (  # where the word is the package; in `[project]` of TOML and in volumes it is not
    (r"\b(from|import) project\b", r"\1 NEW"),
    (r"\b(src|tests)/project\b", r"\1/NEW"),
    (r'"project(?=/)', '"NEW'),
    (r"(?<![\w./\[{-])project(\\?\.)(?=[a-z_{\"\\])", r"NEW\1"),
    (r'"project"(?=, "(samestep|scripts)")', '"NEW"'),
    (r'(SRC / |"samestep", )"project"', r'\1"NEW"'),
)
OF_COPIER = (
    ".copier", "copier.yml", ".copier-answers.yml.jinja", "docs/copies.md", "scripts/rename.py",
    "tests/clone.py", "tests/test_copies.py", "tests/test_rename.py",
)  # fmt: skip
LINK_TO_COPIES = re.compile(r"^- .*?\n(?=- |\n)", re.M | re.S)


def git(*words: str) -> str:
    """What git says."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"git {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def is_library(name: str) -> bool:
    """Whether this name is imported from elsewhere already, or the project depends on it."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a folder such as data/ has no origin
        return True
    listed = re.findall(r"^([a-z0-9_-]+)==", (ROOT / "requirements.lock").read_text(), re.M)
    return name in {distribution.replace("-", "_") for distribution in listed}


def rename(text: str, name: str) -> str:
    """``text`` with the package's new name, and without the list items about copies."""
    for old, new in RULES:
        text = re.sub(old, new.replace("NEW", name), text)
    return LINK_TO_COPIES.sub(lambda item: "" if "copies.md" in item[0] else item[0], text)


def main(argv: Sequence[str]) -> int:
    """Rename, and print what to do next. Nothing is committed. Returns 0."""
    parser = Parser("rename.py", __doc__)
    parser.add_argument("name", help="the new name, as in `import pets`")
    name = parser.parse(argv).name
    taken = {"project", "samestep", "scripts", "tests", "train", *sys.stdlib_module_names}
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in taken:
        parser.error(f"{name!r} is no name for a package: use lower-case letters, as in 'pets'")
    if is_library(name):
        parser.error(
            f"{name!r} is a library, which a package of this name would hide: as in 'pets'"
        )
    if not (ROOT / "src/project").is_dir():
        parser.error("there is no src/project: the package has another name already")
    if git("status", "--porcelain"):
        parser.error("there are uncommitted changes: commit them first, so that you can go back")
    git("rm", "-r", "--quiet", "--ignore-unmatch", *OF_COPIER)
    for folder in ("src", "tests"):
        git("mv", f"{folder}/project", f"{folder}/{name}")
    for file in git("ls-files", "-z", ":!src/samestep", ":!tests/golden").split("\0")[:-1]:
        path = ROOT / file
        is_text = path.suffix in {".py", ".yaml", ".yml", ".md", ".toml"} or "." not in path.name
        if not is_text or path.is_symlink() or not path.is_file():  # a link, or a submodule
            continue
        with contextlib.suppress(UnicodeDecodeError):  # of data without a suffix
            path.write_bytes(rename(path.read_bytes().decode("utf-8"), name).encode("utf-8"))
    print(f"src/project is src/{name} now. Next: make format lint, then commit")
    return 0


if __name__ == "__main__":
    options.run(main)
