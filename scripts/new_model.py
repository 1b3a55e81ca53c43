"""Copy a model under a new name: its net, its config and its test.

The copy edits tokens, never words: a name or a string that *is* the old name, or a dotted path or
override with the old name as a part, as in ``project.model.nets.cnn.CNN`` and ``model=cnn``.
Comments, docstrings and longer words stay as they are.
"""

import argparse
import difflib
import importlib.util
import io
import itertools
import keyword
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import yaml

MAX_LENGTH = 30
NOT_NAMES = {"null", "nan", "inf", "i", "o"}  # values to Hydra, or classes I and O, unreadable
EDITED = r"(?:[rRbBuU]*(['\"]))?[\w.=/+]+(?(1)\1)"  # a token that is a name, a path or an override
WORDS = r"^\w*['\"]|\w+"  # its words, after the opening of a string, as in r"


def new_model(root: Path, name: str, source: str, dry_run: bool) -> str:
    """Write the copy, or only show it, and say what was done and what to type next.

    Args:
        root: the repository.
        name: the new model, as in ``model=<name>``.
        source: the model to copy.
        dry_run: write nothing.

    Raises:
        ValueError: the name cannot be used, there is no such source, or a file is there already.
    """
    check_name(name)
    pairs, table = plan(root, name, source)
    copies = {new: copy_text(root, old, new, table) for old, new in pairs.items()}
    if not dry_run:
        write(copies)
    lines = ["This would be written:" if dry_run else "Written:"]
    for old, new in pairs.items():
        lines.append(str(new.relative_to(root)))
        if dry_run:
            before, after = old.read_text("utf-8").splitlines(), copies[new].splitlines()
            diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
            lines += [f"  {line}" for line in diff if not line.startswith("@@")]
    commands = f"python train.py model={name}", f"make test ARGS={new.relative_to(root)}"
    return "\n  ".join(lines) + "\n" + "\n  ".join(["Next:", *commands])


def plan(root: Path, name: str, source: str) -> tuple[dict[Path, Path], dict[str, str]]:
    """The files to copy, old path to new, and the words to replace in them."""
    config = root / "configs/model" / f"{source}.yaml"
    models = sorted(path.stem for path in config.parent.glob("*.yaml") if path.stem != "default")
    if source not in models:
        near = difflib.get_close_matches(source, models, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(models)}"
        raise ValueError(f"there is no model {source!r} to copy: {hint}")
    target = str(yaml.safe_load(config.read_text("utf-8")).get("net", {}).get("_target_"))
    package, _, net_class = target.rpartition(".")
    module = package.removeprefix("project.model.nets.")
    pairs = {
        root / "src/project/model/nets" / f"{module}.py": root
        / "src/project/model/nets"
        / f"{name}.py",
        config: config.with_stem(name),
        root / "tests/project/model/nets" / f"test_{module}.py": root
        / "tests/project/model/nets"
        / f"test_{name}.py",
    }
    for path in pairs:
        if not path.is_file():
            missing = path.relative_to(root)
            raise ValueError(f"{source!r} cannot be copied: its net is {target}, without {missing}")
    for path in (*pairs.values(), config.with_name(name), root / "src/project/model/nets" / name):
        if path.exists():
            raise ValueError(f"{name!r} is taken: there is {path.relative_to(root)}")
    return pairs, {source: name, module: name, net_class: class_name(name)}


def copy_text(root: Path, old: Path, new: Path, table: dict[str, str]) -> str:
    """The text of the copy. A new word that the file uses already is a ValueError."""
    text = old.read_text("utf-8")
    for start, end in reversed(yaml_spans(text) if old.suffix == ".yaml" else python_spans(text)):
        token = text[start:end]
        if not re.fullmatch(EDITED, token):
            continue
        words = re.findall(WORDS, token)
        for clash in (set(words) - table.keys()) & set(table.values()):
            where = old.relative_to(root)
            raise ValueError(f"{clash!r} has a meaning in {where}: use another name")
        token = re.sub(WORDS, lambda word: table.get(word[0], word[0]), token)
        text = text[:start] + token + text[end:]
    return text if new.suffix == ".yaml" else tidy(text, new, root)


def check_name(name: str) -> None:
    """Raise ValueError unless the name suits a file, a Python module and a Hydra choice."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > MAX_LENGTH:
        rule = f"lower-case letters, digits and single underscores, at most {MAX_LENGTH} characters"
        raise ValueError(f"{name!r} is no name for a model: use {rule}, as in 'squeeze_net'")
    if keyword.iskeyword(name) or keyword.iskeyword(class_name(name)) or name in NOT_NAMES:
        raise ValueError(f"{name!r} is no name for a model: Python or Hydra give it a meaning")


def class_name(name: str) -> str:
    """``squeeze_net`` to ``SqueezeNet``."""
    return "".join(part.capitalize() for part in name.split("_"))


def python_spans(text: str) -> list[tuple[int, int]]:
    """Start and end, in characters, of every name and string."""
    lines = [*itertools.accumulate(map(len, io.StringIO(text)), initial=0)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (lines[token.start[0] - 1] + token.start[1], lines[token.end[0] - 1] + token.end[1])
        for token in tokens
        if token.type in (tokenize.NAME, tokenize.STRING)
    ]


def yaml_spans(text: str) -> list[tuple[int, int]]:
    """Start and end, in characters, of every scalar."""
    scalars = (token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken))
    return [(scalar.start_mark.index, scalar.end_mark.index) for scalar in scalars]


def tidy(text: str, path: Path, root: Path) -> str:
    """Sort imports and wrap lines as ruff does, where it is installed: names change lengths."""
    if not importlib.util.find_spec("ruff"):
        return text
    for command in (["check", "--select=I", "--fix", "--exit-zero"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={path}", "-"]
        done = subprocess.run(ruff, input=text, cwd=root, capture_output=True, encoding="utf-8")
        text = done.stdout if done.returncode == 0 else text
    return text


def write(files: dict[Path, str]) -> None:
    """Create all files or, if one cannot be, none. What exists is never overwritten."""
    made: list[Path] = []
    try:
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                made.append(path)
                file.write(text)
    except BaseException:
        for path in made:
            path.unlink()
        raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Copy a net, its config and its test under a new name, ready to train.",
        epilog="example: python scripts/new_model.py squeeze --from cnn",
    )
    parser.add_argument("name", help="the new model, as in `python train.py model=NAME`")
    parser.add_argument("--from", dest="source", required=True, help="the model to copy, as in cnn")
    parser.add_argument("--dry-run", action="store_true", help="show the changes, write nothing")
    try:
        print(new_model(Path(__file__).resolve().parents[1], **vars(parser.parse_args())))
    except ValueError as error:
        parser.error(str(error))
