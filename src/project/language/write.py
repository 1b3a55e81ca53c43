"""Continue a prompt with the model of a run."""

import json
from typing import Any

from project.language.module import LanguageModel
from samestep.errors import ConfigError


def continue_prompt(model: Any, data: Any, arguments: Any) -> str:
    """The prompt with what the model writes after it, as text or as JSON.

    Args:
        model: of the run, as ``project.load_run`` gives it.
        data: of the run.
        arguments: of ``scripts/write_text.py``: prompt, length, temperature, seed and format.

    Raises:
        ConfigError: if the run has not learned a text, or an argument cannot be used.
    """
    if not isinstance(model, LanguageModel):
        raise ConfigError("--prompt: this run has not learned a text")
    if not arguments.prompt:
        raise ConfigError("--prompt '': must have at least one character")
    if arguments.length < 1:
        raise ConfigError(f"--length {arguments.length}: must be a whole number, at least 1")
    if not 0 < arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature {arguments.temperature}: must be a number above 0")
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed {arguments.seed}: must be a whole number from 0 to 2**63 - 1")
    text = model.write(
        arguments.prompt, data.vocabulary, arguments.length, arguments.temperature, arguments.seed
    )
    if arguments.format == "json":
        return json.dumps({"prompt": arguments.prompt, "text": text}, indent=2)
    return f"{arguments.prompt}{text}"
