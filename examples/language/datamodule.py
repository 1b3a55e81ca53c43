"""A text, from its file to batches of windows."""

# ruff: noqa: D102  # what each hook is for: Lightning's documentation
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar

import lightning as L

from examples.language.text import Vocabulary, Windows, read_text, split
from samestep import BatchLoader, ConfigError


@dataclass(kw_only=True, eq=False, repr=False)
class TextDataModule(L.LightningDataModule):
    """A text, split by position into train, val and test.

    The vocabulary is made of the training text. A checkpoint keeps it, and a digest of the whole
    text: a run cannot be continued or evaluated with another text. The help texts of Python differ
    from one version of Python to the next.
    """

    file: str | None  # in UTF-8; None: the help texts that Python ships, pydoc_data.topics
    val_share: float  # of the text, before the part for the test
    test_share: float  # of the text, at its end
    vocabulary_size: int  # most ids; id 0 stands for all characters that have no id of their own
    context: int  # characters of a window
    stride: int  # characters between the starts of two training windows
    global_batch_size: int  # windows per optimizer step, over all ranks
    eval_batch_size: int  # windows per validation or test batch, over all ranks
    seed: int  # of the order of the training windows
    unit: str = "character"  # what messages and metrics count
    vocabulary: Any = field(default=None, init=False)
    digest: str = field(default="", init=False)
    learned: dict[str, Any] = field(default_factory=dict, init=False)  # what a checkpoint says
    train_set: Any = field(default=None, init=False)
    kind_of_vocabulary: ClassVar[Any] = Vocabulary  # of what a checkpoint keeps

    def __post_init__(self) -> None:
        super().__init__()
        numbers = self.val_share, self.test_share, self.context, self.stride, self.vocabulary_size
        if min(numbers) <= 0 or self.vocabulary_size < 2:
            raise ValueError(
                "val_share, test_share, context and stride must be above 0, and vocabulary_size "
                "above 1"
            )

    def setup(self, stage: str) -> None:
        if self.train_set is not None:
            return
        text, self.digest = self.read()
        self.compare()
        # By position, not at random: windows of random places would share characters.
        train, val, test = split(text, self.val_share, self.test_share)
        if len(train) <= self.context or min(len(val), len(test)) < 2:
            raise ConfigError(
                f"data.val_share={self.val_share}, data.test_share={self.test_share}: leave "
                f"{len(train)}, {len(val)} and {len(test)} of the {len(text)} {self.unit}s of "
                f"{self.origin}; training needs more than data.context={self.context}, val and "
                "test at least 2"
            )
        parts = self.encode([train, val, test])
        self.train_set = Windows(parts[0], self.context, self.stride, with_rest=False)
        # They do not overlap: each character but the first is predicted exactly once.
        self.val_set, self.test_set = (
            Windows(part, self.context, self.context, with_rest=True) for part in parts[1:]
        )

    def read(self) -> tuple[Any, str]:
        """The text, and a digest of it."""
        text = read_text(self.file)
        return text, sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The ids of the parts for train, val and test."""
        self.vocabulary = Vocabulary.of_text(parts[0], self.vocabulary_size)
        return [self.vocabulary.encode(part) for part in parts]

    def train_dataloader(self) -> BatchLoader:
        return BatchLoader(
            self.train_set, self.global_batch_size, shuffle=True, drop_last=True, seed=self.seed,
            accumulate_grad_batches=self.trainer.accumulate_grad_batches if self.trainer else 1,
        )  # fmt: skip

    def val_dataloader(self) -> BatchLoader:
        return BatchLoader(self.val_set, self.eval_batch_size)

    def test_dataloader(self) -> BatchLoader:
        return BatchLoader(self.test_set, self.eval_batch_size)

    @property
    def origin(self) -> str:
        """Where the text comes from, in words."""
        return self.file or f"pydoc_data.topics of Python {platform.python_version()}"

    def state_dict(self) -> dict[str, Any]:
        content = self.vocabulary.content
        return {"vocabulary": content, "digest": self.digest, "origin": self.origin}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.learned = state_dict
        self.compare()
        self.vocabulary = self.kind_of_vocabulary(state_dict["vocabulary"])

    def compare(self) -> None:
        """Raise a ConfigError if the checkpoint was trained on another text than this one."""
        # Called twice, because Lightning loads the state before or after setup().
        if self.digest and self.learned and self.digest != self.learned["digest"]:
            raise ConfigError(
                f"data.file={self.file or 'null'}: this run has learned {self.learned['origin']} "
                f"(SHA-256 {self.learned['digest'][:12]}), and here is {self.origin} "
                f"({self.digest[:12]}); name a file with the same text, use that version of "
                "Python, or start a new run"
            )
