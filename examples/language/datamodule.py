"""A text, from its file to batches of windows."""

import platform
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import lightning as L

from examples.language.text import Vocabulary, Windows, read_text, split
from samestep import BatchLoader, ConfigError


class TextDataModule(L.LightningDataModule):
    """A text, split by position into train, val and test.

    The vocabulary is made of the training text. A checkpoint keeps it, and a digest of the whole
    text: a run cannot be continued or evaluated with another text. The help texts of Python differ
    from one version of Python to the next.

    Args:
        file: a text in UTF-8; None takes the help texts that Python ships, ``pydoc_data.topics``.
        val_share: fraction of the text that is held out for validation.
        test_share: fraction of the text, at its end, that is held out for the test.
        vocabulary_size: most ids; id 0 stands for all characters that have no id of their own.
        context: characters of a window.
        stride: characters between the starts of two training windows. Windows of val and test do
            not overlap, so each of their characters but the first is predicted exactly once.
        global_batch_size: windows per optimizer step, over all ranks.
        eval_batch_size: windows per validation or test batch, over all ranks.
        seed: of the order of the training windows.
        unit: what messages and metrics count, such as ``character``.

    Raises:
        RunError: at ``setup``, if the file cannot be read.
        ConfigError: at ``setup``, if ``global_batch_size`` is less than a window for each rank, the
            text is too short, or it is not the text of the checkpoint.
    """

    def __init__(
        self,
        *,
        file: str | None,
        val_share: float,
        test_share: float,
        vocabulary_size: int,
        context: int,
        stride: int,
        global_batch_size: int,
        eval_batch_size: int,
        seed: int,
        unit: str = "character",
    ) -> None:
        super().__init__()
        self.file = file
        self.val_share = val_share
        self.test_share = test_share
        self.vocabulary_size = vocabulary_size
        self.context = context
        self.stride = stride
        self.global_batch_size = global_batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.unit = unit
        self.vocabulary: Any = None
        self.digest: str | None = None
        self.learned: dict[str, Any] | None = None  # the state of a checkpoint
        self.train_set: Windows | None = None

    def setup(self, stage: str) -> None:
        """Read and split the text, once. Lightning calls this on every rank and stage."""
        if self.train_set is not None:
            return
        text, self.digest = self.read()
        self._compare()
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
        self.val_set, self.test_set = (
            Windows(part, self.context, self.context, with_rest=True) for part in parts[1:]
        )
        if len(self.train_set) < self.global_batch_size:
            raise ConfigError(
                f"data.global_batch_size={self.global_batch_size}: must not exceed the "
                f"{len(self.train_set)} training windows of {self.origin}; set "
                f"data.global_batch_size={max(1, len(self.train_set) // 4)}"
            )

    def read(self) -> tuple[Any, str]:
        """The text, and a digest of it."""
        text = read_text(self.file)
        return text, sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The ids of the parts for train, val and test."""
        self.vocabulary = Vocabulary.of_text(parts[0], self.vocabulary_size)
        return [self.vocabulary.encode(part) for part in parts]

    def make_vocabulary(self, content: Any) -> Any:
        """The vocabulary that a checkpoint keeps."""
        return Vocabulary(content)

    def train_dataloader(self) -> BatchLoader:
        """Training batches, in a new order each epoch."""
        assert self.train_set is not None, "setup() comes first"
        return BatchLoader(
            self.train_set,
            self.global_batch_size,
            shuffle=True,
            drop_last=True,
            seed=self.seed,
            accumulate_grad_batches=self._batches_per_step(),
        )

    def val_dataloader(self) -> BatchLoader:
        """Validation batches, in the order of the text."""
        return BatchLoader(self.val_set, self.eval_batch_size)

    def test_dataloader(self) -> BatchLoader:
        """Test batches, in the order of the text."""
        return BatchLoader(self.test_set, self.eval_batch_size)

    @property
    def origin(self) -> str:
        """Where the text comes from, in words."""
        return self.file or f"pydoc_data.topics of Python {platform.python_version()}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the vocabulary, and what the run has read."""
        assert self.vocabulary is not None, "setup() comes first"
        assert self.digest is not None, "setup() comes first"
        return {
            "vocabulary": self.vocabulary.content,
            "digest": self.digest,
            "origin": self.origin,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the vocabulary from a checkpoint, before or after ``setup``.

        Raises:
            ConfigError: after ``setup``, if the run was trained with another text.
        """
        self.learned = state_dict
        self._compare()
        self.vocabulary = self.make_vocabulary(state_dict["vocabulary"])

    def _compare(self) -> None:
        """Raise a ConfigError if the checkpoint was trained on another text than this one."""
        # Called twice, because Lightning loads the state before or after setup().
        if self.digest and self.learned and self.digest != self.learned["digest"]:
            raise ConfigError(
                f"data.file={self.file or 'null'}: this run has learned {self.learned['origin']} "
                f"(SHA-256 {self.learned['digest'][:12]}), and here is {self.origin} "
                f"({self.digest[:12]}); name a file with the same text, use that version of "
                "Python, or start a new run"
            )

    def _batches_per_step(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1
