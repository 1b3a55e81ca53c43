"""A sample of what the model has learned: text that it writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L


@dataclass(eq=False)
class Samples(L.Callback):
    """Lets the tested model continue a prompt; rank zero writes ``sample.txt``."""

    dirpath: str
    prompt: str
    length: int  # characters to write
    temperature: float  # above 0
    seed: int

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not self.prompt:
            raise ValueError("temperature must be above 0, and prompt not empty")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the text."""
        # On all ranks: where FSDP shards the weights, no rank can run the model alone.
        how = self.length, self.temperature, self.seed
        text = self.prompt + pl_module.write(self.prompt, trainer.datamodule.vocabulary, *how)
        if trainer.is_global_zero:
            path = Path(self.dirpath, "sample.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", "utf-8")
