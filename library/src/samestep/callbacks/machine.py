"""With virtual ranks: what equal bits need of the processors, kept with the run."""

from typing import Any

import lightning as L
import torch

from samestep.callbacks.notes import print_note
from samestep.callbacks.run_state import Part, Saved
from samestep.ranks import environment, virtual
from samestep.ranks.process_group import gather

NOTE_ON_RANKS = (
    "Note: the processors of the ranks have {}: on another number of ranks the steps are equal up "
    "to rounding, and not in every bit"
)
NOTE_ON_CAPABILITY = (
    "Note: this run began on processors with {}, and continues on ones with {}: from here on its "
    "steps are equal up to rounding, and not in every bit"
)


class Machine(Part):
    """Keeps the threads of a rank: with another number of them, torch adds in another order."""

    key = "machine"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give each rank the processors of a slice, so that the number of ranks does not matter."""
        threads = max(1, int(environment.num_cpus() / virtual.layout().total))
        # Nodes may differ, and a slice must not depend on which of them has it.
        ranks = gather((threads, capability()))
        torch.set_num_threads(min(threads for threads, _ in ranks))
        capabilities = {name for _, name in ranks}
        if len(capabilities) > 1:
            print_note(trainer, NOTE_ON_RANKS.format(" and ".join(sorted(capabilities))))

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Keep the threads, and the instructions that torch uses."""
        return {"threads": torch.get_num_threads(), "capability": capability()}

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Use as many threads again; say so if this machine cannot compute the same bits."""
        torch.set_num_threads(saved.own["threads"])
        if saved.own["capability"] != capability():
            print_note(trainer, NOTE_ON_CAPABILITY.format(saved.own["capability"], capability()))


def capability() -> str:
    """The instructions that torch uses, such as AVX512."""
    return torch.backends.cpu.get_cpu_capability()
