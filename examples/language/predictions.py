"""A sample of what the model has learned: text that it writes."""

from pathlib import Path
from typing import Any

import lightning as L


class Samples(L.Callback):
    """Lets the tested model continue a prompt, and keeps the text.

    Rank zero writes ``sample.txt``.

    Args:
        dirpath: where the text goes.
        prompt: what the model continues.
        length: characters to write.
        temperature, seed: see ``LanguageModel.write``.
    """

    def __init__(
        self, dirpath: str, prompt: str, length: int, temperature: float, seed: int
    ) -> None:
        self.dirpath = Path(dirpath)
        self.prompt = prompt
        self.length = length
        self.temperature = temperature
        self.seed = seed

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the text."""
        # On all ranks: where FSDP shards the weights, no rank can run the model alone.
        vocabulary = trainer.datamodule.vocabulary
        text = self.prompt + pl_module.write(
            self.prompt, vocabulary, self.length, self.temperature, self.seed
        )
        if trainer.is_global_zero:
            self.dirpath.mkdir(parents=True, exist_ok=True)
            (self.dirpath / "sample.txt").write_text(f"{text}\n", "utf-8")
