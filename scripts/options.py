"""The command lines of evaluate, predict and export: words such as ``split=val``, and files.

Torch is imported once the words are checked.
"""

import difflib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, secrets
from samestep.run.directory import load_run

# Each key and its default: text, where it is None; a number from 1 on; the first of its choices.
RUN = {"run": None, "ckpt": ("best", "last")}
ACCELERATOR = {"accelerator": ("auto", "cpu", "gpu")}
FORMAT = {"format": ("table", "json")}
DATA = {"data.root": None, "data.mirror": None, "data.download": (None, "true", "false")}
OPTIONS: dict[str, dict[str, Any]] = {
    "evaluate": RUN | {"split": ("test", "val")} | ACCELERATOR | FORMAT | DATA,
    "predict": RUN | {"top": 1} | ACCELERATOR | FORMAT,
    "export": RUN | DATA,
}
NUM_SHOWN = 3  # runs that an error names


class ScriptError(RunError):
    """What was asked for could not be done: one message, exit code 1."""


def run_script(script: str, usage: str | None, main: Callable[..., int]) -> int:
    """Read the command line, load the run, and call ``main`` with model, data and options.

    Returns:
        What ``main`` returns; 1 after an error of data or files; 2 after wrong usage.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage, "Options, the default first:", *map(_help, OPTIONS[script].items()), sep="\n")
        return 0
    environment.limit_threads()
    logging.disable(logging.INFO)  # notes of libraries
    warnings.simplefilter("ignore", FutureWarning)  # to the developers of libraries
    try:
        values = options(sys.argv[1:], OPTIONS[script], files=script == "predict")
        model, data = load_run(values["run"], values["ckpt"])
        data.root = Path(values.get("data.root") or data.root)
        data.mirror = values.get("data.mirror") or data.mirror
        if values.get("data.download"):
            data.download = values["data.download"] == "true"
        return main(model, data, values)
    except ConfigError as error:
        return _fail(error, exit_code=2)
    except (RunError, OSError) as error:
        return _fail(error, exit_code=1)


def _fail(error: Exception, *, exit_code: int) -> int:
    print(f"error: {secrets.redact(str(error))}", file=sys.stderr)
    return exit_code


def options(words: Iterable[str], known: dict[str, Any], *, files: bool) -> dict[str, Any]:
    """The value of every known key, and under ``files`` the words that are none.

    Raises:
        ConfigError: if a key or value does not exist, there are no ``files`` or should be none,
            or ``run`` is not the directory of a run.
    """
    values = {key: kind[0] if isinstance(kind, tuple) else kind for key, kind in known.items()}
    values["files"] = []
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in known:
            values[key] = _value(word, text, known[key])
        elif files and (not equals or Path(word).exists()):
            values["files"].append(word)
        else:
            run = f"did you mean run={word}?" if Path(word).is_dir() else ""
            raise ConfigError(f"{word}: no such option; {run or _hint(key, list(known))}")
    if not values["run"] or not (Path(values["run"]) / "config.yaml").is_file():
        runs = sorted(Path("runs").glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime)
        newest = "".join(f"\n  run={path.parent}" for path in runs[:NUM_SHOWN])
        hint = f"the newest are{newest}" if runs else "python train.py makes one in runs/"
        raise ConfigError(f"run={values['run'] or ''}: must be the directory of a run; {hint}")
    if files and not values["files"]:
        raise ConfigError("there is nothing to predict; name image files, or directories of them")
    return values


def _help(option: tuple[str, Any]) -> str:
    key, kind = option
    choices = kind if isinstance(kind, tuple) else (kind,)
    return f"  {key}={'|'.join(str(choice) for choice in choices if choice)}"


def _value(word: str, text: str, kind: Any) -> Any:
    if isinstance(kind, tuple) and text not in kind:
        raise ConfigError(f"{word}: no such choice; {_hint(text, [c for c in kind if c])}")
    if isinstance(kind, int):
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{word}: must be a whole number, at least 1")
        return int(text)
    return text


def _hint(word: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(choices)}"
