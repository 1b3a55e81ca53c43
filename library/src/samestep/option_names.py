"""How messages name an option, such as ``max_skipped``: by the words that the user types.

A script types arguments of ``samestep.Trainer`` and its callbacks, so ``max_skipped=10``. A front
end sets its own names once in a process: ``samestep.hydra`` keys such as
``callbacks.loss_guard.max_skipped=10``, LightningCLI ``--trainer.max_epochs=10``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_names: dict[str, str] = {}  # of the front end, by the name of the argument
_words: dict[str, str] = {}  # how the front end writes None, True and False


def use(names: Mapping[str, str], words: Mapping[str, str]) -> None:
    """Name options as this front end does, from now on; empty tables name the arguments."""
    _names.clear()
    _names.update(names)
    _words.clear()
    _words.update(words)


def option(name: str) -> str:
    """The argument ``name`` as the user types it, without a value."""
    return _names.get(name, name)


def setting_of_words(name: str, words: Sequence[str]) -> str:
    """The argument with a list of words, as the user types it: ``allow_changes=["model.lr"]``."""
    if name in _names:
        # In quotes: for a shell, brackets are a pattern of file names.
        return f"'{_names[name]}=[{','.join(words)}]'"
    return f"{name}={json.dumps(list(words))}"


def setting(name: str, value: Any, of: str = "") -> str:
    """The argument with a value, as the user types it: ``monitor=None``.

    ``of`` is the class that takes the argument, if it is not the Trainer: a script makes an object
    of it, ``LossGuard(max_skipped=10)``, and a front end has one key.
    """
    text = str(value)
    typed = f"{option(name)}={_words.get(text, text)}"
    if of and name not in _names:
        return f"{of}({typed})"
    return typed
