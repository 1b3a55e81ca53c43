"""Predictions to look at: text that the model writes."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger


class Samples(L.Callback):
    """Lets the tested model continue a prompt, and keeps the text.

    Rank zero writes ``sample.txt``, and logs the text as ``test/sample`` to TensorBoard and W&B.
    All ranks draw the same text, because no rank can use a model alone whose weights are
    distributed over the ranks.

    Args:
        dirpath: where the text goes.
        prompt: what the model continues.
        length: characters to write.
        temperature: 1 draws from what was learned; less prefers likely characters.
        seed: of what is drawn.
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
        vocabulary = trainer.datamodule.vocabulary
        text = self.prompt + pl_module.write(
            self.prompt, vocabulary, self.length, self.temperature, self.seed
        )
        if not trainer.is_global_zero:
            return
        self.dirpath.mkdir(parents=True, exist_ok=True)
        (self.dirpath / "sample.txt").write_text(f"{text}\n", "utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # It shows Markdown, in which an indented block is shown as it is.
                shown = "\n".join(f"    {line}" for line in text.splitlines())
                logger.experiment.add_text("test/sample", shown, trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_text("test/sample", columns=["text"], data=[[text]])
