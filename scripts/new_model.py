"""Copy a model under a new name: its net, its config and its test.

python scripts/new_model.py squeeze --from cnn

In the copies the words `cnn` and `CNN` become `squeeze` and `Squeeze`; longer words stay.
"""

import argparse
import difflib
import importlib.util
import keyword
import re
import subprocess
import sys
from pathlib import Path

import yaml

from samestep.ranks import process

ROOT = Path(__file__).resolve().parents[1]
NETS, CONFIGS, TESTS = "src/project/model/nets", "configs/model", "tests/project/model/nets"
MAX_LENGTH = 30
NOT_NAMES = {"null", "nan", "inf", "i", "o"}  # values to Hydra, or classes I and O, unreadable


def new_model(root: Path, name: str, source: str, dry_run: bool) -> str:
    """Write the copy, or only show it.

    Args:
        root: the repository.
        name: the new model, as in ``model=<name>``.
        source: the model to copy.
        dry_run: write nothing.

    Returns:
        What was done, and what to type next.

    Raises:
        ValueError: if the name cannot be used, there is no such source, or a file exists already.
    """
    check_name(name)
    module, net_class = find_net(root, source)
    new_names = {source: name, module: name, net_class: class_name(name)}
    files = {
        f"{NETS}/{module}.py": f"{NETS}/{name}.py",
        f"{CONFIGS}/{source}.yaml": f"{CONFIGS}/{name}.yaml",
        f"{TESTS}/test_{module}.py": f"{TESTS}/test_{name}.py",
    }
    # A folder such as configs/model/optimizer would hide the new config, and one of nets the net.
    for path in (*files.values(), f"{CONFIGS}/{name}", f"{NETS}/{name}"):
        if (root / path).exists():
            raise ValueError(f"{name!r} is taken: there is {path}")
    texts = {old: (root / old).read_text("utf-8") for old in files}
    copies = {new: rename(texts[old], new_names, old) for old, new in files.items()}

    lines = ["This would be written:" if dry_run else "Written:"]
    for old, new in files.items():
        lines.append(f"  {new}")
        if dry_run:
            lines += show_changes(texts[old], copies[new])
    if not dry_run:
        for path, text in copies.items():
            (root / path).write_text(text, "utf-8")
        format_files([root / path for path in copies if path.endswith(".py")])
    test = f"{TESTS}/test_{name}.py"
    return "\n".join(
        [*lines, "Next:", f"  python train.py model={name}", f"  make test ARGS={test}"]
    )


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


def find_net(root: Path, source: str) -> tuple[str, str]:
    """Module and class of the net of a model, such as ``("cnn", "CNN")``.

    Raises:
        ValueError: if there is no such model, or its net or the test of it is not in this project.
    """
    paths = (root / CONFIGS).glob("*.yaml")
    models = {path.stem: path for path in paths if path.stem != "default"}
    if source not in models:
        near = difflib.get_close_matches(source, models, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(models))}"
        raise ValueError(f"there is no model {source!r} to copy: {hint}")
    config = yaml.safe_load(models[source].read_text("utf-8"))
    target = str(config.get("net", {}).get("_target_"))
    package, _, net_class = target.rpartition(".")
    module = package.removeprefix("project.model.nets.")
    for path in (f"{NETS}/{module}.py", f"{TESTS}/test_{module}.py"):
        if not (root / path).is_file():
            raise ValueError(f"{source!r} cannot be copied: its net is {target}, without {path}")
    return module, net_class


def rename(text: str, new_names: dict[str, str], path: str) -> str:
    """Replace whole words. A new name that stands in the text already is a ValueError."""
    for old, new in new_names.items():
        if new != old and re.search(rf"\b{new}\b", text):
            raise ValueError(f"the word {new!r} stands in {path} already: use another name")
    words = "|".join(new_names)
    return re.sub(rf"\b({words})\b", lambda match: new_names[match[0]], text)


def show_changes(before: str, after: str) -> list[str]:
    """Each changed line, before and after."""
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))
    return [f"    {line}" for line in diff[2:] if not line.startswith("@@")]


def format_files(paths: list[Path]) -> None:
    """Wrap lines anew, because names of another length change them; without ruff nothing."""
    if importlib.util.find_spec("ruff"):
        subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *paths], check=False)


def main() -> int:
    """Copy the model, and print what was done and what to type next."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="the new model, as in `python train.py model=NAME`")
    parser.add_argument("--from", dest="source", required=True, help="the model to copy, as in cnn")
    parser.add_argument("--dry-run", action="store_true", help="show the changes, write nothing")
    try:
        print(new_model(ROOT, **vars(parser.parse_args())))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    process.run(main)
