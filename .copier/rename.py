"""Give the package and the images of a copy their names. Copier calls this in the copy's folder.

It also makes a relative address of the template absolute, with which `copier update` would look for
the template below the copy.

python rename.py TEMPLATE PACKAGE NAME
"""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

FOLDERS = re.compile(r"^(src|tests)/project(?=/)")
# Where the word is the package: in `[project]` of TOML, in code that reads it, and in volumes it is
# not.
OF_THE_PACKAGE = (
    r"(?<=\bfrom )project\b",
    r"(?<=\bimport )project\b",
    r"(?<=\btests\.)project(?=\.)",
    r"(?<=\bsrc/)project\b",
    r"(?<=\btests/)project\b",
    r'(?<=")project(?=/)',
    r'(?<=")project(?="(?!\]))',
    r"(?<![\w./\[{-])project(?=\\?\.[a-z_{\"\\])",
)
OF_THE_NAME = (
    r"(?<=example\.com/)project\b",  # of an image
    r"(?<=: )project(?= #)",  # a default of configs/
    r"\bproject(?=-(runs|data)\b)",  # of a volume
    r"(?<=pip install ')project(?=\[)",  # of an extra
)
# A copy has no docs/: its README says where those of the template are.
LINK_TO_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./\.\./(docs/[^)#]+)[^)]*\)")


def rename(text: str, package: str, name: str) -> str:
    """``text`` with both names, and without links to pages that the copy does not have."""
    for patterns, new in ((OF_THE_PACKAGE, package), (OF_THE_NAME, name)):
        for pattern in patterns:
            text = re.sub(pattern, new, text)
    return LINK_TO_DOCS.sub(r"\1 (`\2` of the template)", text)


def main(template: Path, package: str, name: str) -> None:
    """Rename in all files that come from the template; files of the user stay as they are."""
    for source in sorted(template.rglob("*")):
        path = source.relative_to(template)
        if not path.is_file() or path.parts[0] in (".git", "library"):
            continue
        renamed = Path(FOLDERS.sub(rf"\1/{package}", path.as_posix()))
        renamed.parent.mkdir(parents=True, exist_ok=True)
        path.replace(renamed)
        if path.suffix in {".py", ".yaml", ".yml", ".md", ".toml", ".sh", ""}:
            # A checkout may hold other files that are no text, such as data: they stay as they are.
            with suppress(UnicodeDecodeError):
                renamed.write_text(rename(renamed.read_text("utf-8"), package, name), "utf-8")
    for folder in (Path("src/project"), Path("tests/project"), Path(".copier")):
        for empty in (*sorted(folder.rglob("*"), reverse=True), folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


def make_address_absolute(answers: Path) -> None:
    """Replace the path of the template, as it was typed, by one that is true anywhere.

    An address of git has a colon.
    """
    text = answers.read_text("utf-8")
    found = re.search(r"^_src_path: ([^/~:\s][^:\n]*)$", text, re.MULTILINE)
    if found is None:
        return
    # Copier has gone to the folder of the copy; the shell has said where it was called.
    template = Path(os.environ.get("PWD", ""), found[1].strip("'\"")).resolve()
    if not (template / "copier.yml").is_file():
        sys.exit(f"{found[1]}: is relative, and copier update would not find it; use a full path")
    start, end = found.span(1)
    answers.write_text(f"{text[:start]}{template}{text[end:]}", "utf-8")


if __name__ == "__main__":
    make_address_absolute(Path(".copier-answers.yml"))
    main(Path(sys.argv[1]), *sys.argv[2:])
