"""Start a model or a data set of your own from a copy of an existing one.

python scripts/new.py model NAME --from MODEL    # its config and its net
python scripts/new.py data NAME --from DATA      # its config

In the config and the net the names of the old model and its class become the new ones.
"""

import importlib.util
import keyword
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from samestep import ConfigError, Parser, run_script

ROOT = Path(__file__).resolve().parents[1]
NAME = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"


def copy(root: Path, group: str, name: str, source: str) -> list[Path]:
    """Write the copies below ``root``; a ConfigError says why not, and nothing was written then."""
    new_class = "".join(part.capitalize() for part in name.split("_"))
    if not re.fullmatch(NAME, name) or keyword.iskeyword(name) or keyword.iskeyword(new_class):
        raise ConfigError(f"{name!r}: not a name; use lower-case letters, digits and underscores")
    configs = root / "configs" / group
    names = sorted(path.stem for path in configs.glob("*.yaml") if path.stem != "default")
    if source not in names:
        raise ConfigError(f"no {group} {source!r} to copy: choose from {', '.join(names)}")
    files, words = {configs / f"{source}.yaml": configs / f"{name}.yaml"}, {}
    if group == "model":
        module, old_class = find_net(configs / f"{source}.yaml")
        files[root / f"src/{module}.py"] = root / f"src/{module.parent}/{name}.py"
        words = {source: name, module.name: name, old_class: new_class}
    for path in (*files.values(), configs / name):
        if path.exists():
            raise ConfigError(f"{name!r} is taken: there is {path.relative_to(root)}")
    texts = {new: replace_words(old.read_text("utf-8"), words) for old, new in files.items()}
    try:
        for path, text in texts.items():
            path.write_text(text, "utf-8")
    except OSError:
        for path in texts:
            path.unlink(missing_ok=True)
        raise
    return list(texts)


def find_net(config: Path) -> tuple[Path, str]:
    """The module of a model's net, below ``src`` and without .py, and its class."""
    try:
        target = yaml.safe_load(config.read_text("utf-8"))["net"]["_target_"]
    except (KeyError, TypeError, yaml.YAMLError):
        target = None
    if not str(target).startswith("project."):
        raise ConfigError(f"{config.name} names no net of this project: copy the file yourself")
    *module, net = target.split(".")
    return Path(*module), net


def replace_words(text: str, words: dict[str, str]) -> str:
    """Replace whole words. A new word that stands in the text already is a ConfigError."""
    for old, new in words.items():
        if new != old and re.search(rf"\b{new}\b", text):
            raise ConfigError(f"{new!r} already occurs in the files: use another name")
    return re.sub(r"\w+", lambda match: words.get(match[0], match[0]), text)


def main(argv: Sequence[str]) -> int:
    """Copy, and print what was written and what to do next. Returns 0."""
    parser = Parser("new.py", __doc__)
    parser.add_argument("group", choices=["model", "data"])
    parser.add_argument("name", help="the new one, as in `python train.py model=NAME`")
    parser.add_argument("--from", dest="source", required=True, help="the one to copy")
    chosen = parser.parse(argv)
    files = copy(ROOT, chosen.group, chosen.name, chosen.source)
    if importlib.util.find_spec("ruff"):  # names of another length change where lines break
        subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *files[1:]], check=False)
    print("Written:", *files, "Change them, then:", sep="\n  ")
    empty = re.findall(r"^(\w+): \?\?\?", files[0].read_text("utf-8"), re.M)
    values = "".join(f" {chosen.group}.{key}=..." for key in empty)
    print(f"  python train.py {chosen.group}={chosen.name}{values}")
    return 0


if __name__ == "__main__":
    run_script(main)
