"""What a part of a model adds up over an epoch, on each rank for itself."""

from torch import Tensor, nn


class EpochSums(nn.Module):
    """Sums of one rank, which a checkpoint within an epoch keeps; ``EpochMean`` has some.

    On the same number of ranks each gets its own sums back, and otherwise rank zero those of all.
    """

    def state(self) -> Tensor:
        """The sums of this rank so far, which can be added to those of other ranks."""
        raise NotImplementedError

    def load_state(self, totals: Tensor) -> None:
        """Continue from what ``state`` returned."""
        raise NotImplementedError
