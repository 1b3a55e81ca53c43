"""What a checkpoint holds of each rank beside what Lightning saves: one place, one exchange.

Lightning saves what rank zero has, and gives it to every rank. A ``Part`` is a callback that has
more to keep: it is asked on each rank when a checkpoint is saved, and gets everything back when the
run continues, on whatever number of ranks.
"""

from typing import Any, NamedTuple

import lightning as L

from samestep.callbacks.notes import print_note
from samestep.errors import ConfigError
from samestep.ranks import virtual
from samestep.ranks.compat import callbacks_of
from samestep.ranks.process_group import gather

KEY = "samestep"
NOTE_ON_RANKS = (
    "Note: this run had {} ranks, and continues on {}: with the same weights, batches and order. "
    "What each rank keeps for itself, such as random numbers and buffers, is that of rank zero; "
    "with virtual_ranks every bit is the same"
)
FORMAT = 1


class Saved(NamedTuple):
    """What a part has kept."""

    own: Any
    """Of this rank; on another number of ranks, of rank zero."""
    ranks: list[Any]
    """Of every rank of the run before."""
    is_same_number: bool
    """Whether there are as many ranks now."""


class Part(L.Callback):
    """A callback that keeps something in each checkpoint."""

    key: str
    """Its name there."""

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> Any:
        """What this rank keeps: numbers, texts, tensors and containers; None for nothing."""
        raise NotImplementedError

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Take what was kept, before Lightning gives anything back; not called without it."""
        raise NotImplementedError


class RunState(L.Callback):
    """Saves and loads all parts."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Exchange what the ranks keep; each of them must call this."""
        own = {part.key: part.save(trainer, checkpoint) for part in callbacks_of(trainer, Part)}
        checkpoint[KEY] = {"format": FORMAT, "ranks": gather(own)}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give each part what it has kept, if the run continues.

        Raises:
            ConfigError: if the checkpoint is of another version.
        """
        if trainer.state.fn != "fit":
            return
        if checkpoint.get(KEY, {}).get("format") != FORMAT:
            raise ConfigError(
                f"{trainer.ckpt_path}: is a checkpoint of another version of samestep; continue "
                "with that version, or start a new run"
            )
        ranks = checkpoint[KEY]["ranks"]
        is_same_number = len(ranks) == trainer.world_size
        if not is_same_number and not virtual.layout().is_virtual:
            print_note(trainer, NOTE_ON_RANKS.format(len(ranks), trainer.world_size))
        for part in callbacks_of(trainer, Part):
            of_ranks = [rank.get(part.key) for rank in ranks]
            if of_ranks[0] is not None:
                own = of_ranks[trainer.global_rank if is_same_number else 0]
                part.load(trainer, checkpoint, Saved(own, of_ranks, is_same_number))
