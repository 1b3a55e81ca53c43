"""What a step launches, beside what a bare loop does: operations of torch, by who calls them.

python -m labs.bench.operations             # both tables; a minute without a GPU
python -m labs.bench.operations --no-table  # leave results.md as it is

Each operation costs the process 5 to 10 us on a GPU, whatever it computes. Without a GPU ours goes
the way of one: losses and gradients are not read in each step, and a fused optimizer skips a step
by a flag. Views and allocations launch nothing and are left out. The numbers are means over
``NUM_STEPS`` steps, so that what happens every 50 steps is in them.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from labs import pages
from labs.bench import epochs
from labs.bench.measure import ROOT
from labs.bench.workloads import parts
from samestep import Trainer
from samestep.ranks import devices

TASK = "operations"
FIRST_STEP = 50
NUM_STEPS = 100
LIMIT = 16  # operations of a step of ours that a bare loop does not have
PAGE = ROOT / "labs/bench/results.md"
MARKERS = ("<!-- operations -->\n", "<!-- end of operations -->")
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

REST = "net, loss, accuracy, gradients"
CALLERS = {
    "samestep/loops.py:_read": "copy of the loss for callbacks",
    "automatic.py:from_training_step_output": "copy of the loss for callbacks",
    "samestep/callbacks/loss_guard.py": "LossGuard",
    "samestep/plugins/receipts.py": "Receipts",
    "samestep/plugins/run_stats.py": "RunStats",
    "samestep/callbacks": "other callbacks",
    "samestep/metrics.py": "EpochMean",
    "samestep/loops.py:closure": REST,
    "lightning/pytorch/loops/optimization/automatic.py:closure": REST,
    "torch/optim": "optimizer",
    "torch/utils/data": "data",
    "samestep/data": "data",
    "labs/bench/epochs.py:batches": "data",
    "project/data": "data",
    "torch/nn/modules": REST,
    "project/model.py:forward": "data",
    "/logger_connector/": "logs",
}
"""The rows of a table, by a part of the place from which an operation is called. The first one
counts, from the innermost place outwards."""


class Step(TorchDispatchMode):
    """Counts the operations of some steps by their callers; ends them by ``Done``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.num_taken = 0

    def step_ends(self, *_: Any) -> None:
        """Begin to count, or end, when an optimizer has taken a step."""
        self.num_taken += 1

    @property
    def is_counting(self) -> bool:
        """Whether a step that counts is being taken."""
        return FIRST_STEP <= self.num_taken < FIRST_STEP + NUM_STEPS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_counting and is_launched(func):
            caller = find_caller(sys._getframe(1))
            self.counts[caller] += 1
            self.names[f"{caller}: {func}"] += 1
        return func(*args, **(kwargs or {}))

    def per_step(self) -> dict[str, float]:
        """Operations of a step, by caller."""
        assert self.num_taken >= FIRST_STEP + NUM_STEPS
        return {caller: count / NUM_STEPS for caller, count in self.counts.items()}


def is_launched(func: Any) -> bool:
    """Whether an operation computes or copies anything, and so is a kernel on a GPU."""
    if func.namespace != "aten" or func.overloadpacket.__name__ in ALLOCATIONS:
        return False
    for value in func._schema.returns:
        # A view of an argument, which it does not change.
        if value.alias_info is not None and not value.alias_info.is_write:
            return False
    return True


def find_caller(frame: FrameType | None) -> str:
    """The row to which an operation belongs."""
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        for part, caller in CALLERS.items():
            if part in place:
                return caller
        frame = frame.f_back
    return REST


class Reached:
    """An event of a GPU that has done all it got."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def copy_at_once(values: Any) -> devices.Copy:
    """As ``devices.start_copy``, without a GPU."""
    return devices.Copy(torch.empty(len(values)).double().copy_(torch.stack([*values])), Reached())


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let the library go the way of a GPU within this block."""
    with (
        mock.patch.object(devices, "is_at_hand", return_value=False),
        mock.patch.object(devices, "is_on_gpu", return_value=True),
        mock.patch.object(devices, "start_copy", copy_at_once),
        # On a GPU a step is faster than these.
        mock.patch("samestep.plugins.receipts.EVERY_S", 1e9),
    ):
        yield


def count(train: Callable[[], Any]) -> dict[str, float]:
    """The operations of a step of a training that takes enough of them, by caller."""
    step = Step()
    hook = register_optimizer_step_post_hook(step.step_ends)
    try:
        with as_on_gpu(), redirect_stdout(sys.stderr), step:
            train()
    finally:
        hook.remove()
    return step.per_step()


# -- The template ----------------------------------------------------------------------------------


def bare_template() -> None:
    """The loop with all images in memory; its accuracy is that of validation only."""
    epochs.bare(TASK)


def plain_template() -> None:
    """Our model and our data, under Lightning's Trainer."""
    trainer = epochs.trainer_of(1, epochs.Timer(), logger=False, enable_checkpointing=False)
    trainer.fit(*parts(epochs.configure(TASK)))


def our_template() -> None:
    """A run of train.py."""
    epochs.train_ours(TASK)


# -- A plain script --------------------------------------------------------------------------------


class Module(L.LightningModule):
    """A LightningModule that logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3, fused=True)


def make_loader() -> DataLoader[Any]:
    """160 batches of two samples."""
    samples = torch.randn(320, 20)
    return DataLoader(TensorDataset(samples, torch.randint(10, (320,))), 2, shuffle=True)


def bare_script() -> None:
    """The loop of a tutorial."""
    module = Module()
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(make_loader()):
        loss = module.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def plain_script() -> None:
    """The same under Lightning's Trainer, without loggers and checkpoints."""
    trainer = epochs.trainer_of(1, epochs.Timer(), logger=False, enable_checkpointing=False)
    trainer.fit(Module(), make_loader())


def our_script() -> None:
    """The same under ours, with everything on."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            run_dir=Path(folder, "run"), max_epochs=1, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), make_loader())


CONTENDERS: dict[str, dict[str, Callable[[], None]]] = {
    "template": {"bare": bare_template, "plain Lightning": plain_template, "ours": our_template},
    "plain script": {"bare": bare_script, "plain Lightning": plain_script, "ours": our_script},
}


def render(title: str, counts: dict[str, dict[str, float]]) -> str:
    """A table of what a step launches, a row for each caller and a column for each contender."""
    callers: list[str] = []
    for found in counts.values():
        callers += [caller for caller in found if caller not in callers]
    callers.sort(key=[REST, *dict.fromkeys(CALLERS.values())].index)
    lines = [f"| {title} | {' | '.join(counts)} |", "|---" * (1 + len(counts)) + "|"]
    for caller in callers:
        numbers = [f"{found.get(caller, 0):.3g}" for found in counts.values()]
        lines.append(f"| {caller} | {' | '.join(numbers)} |")
    totals = [sum(found.values()) for found in counts.values()]
    lines.append(f"| **all** | {' | '.join(f'{total:.4g}' for total in totals)} |")
    more = [f"{total - totals[0]:.3g}" for total in totals]
    lines.append(f"| more than bare | {' | '.join(more)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the tables, and write them into the page. Returns 1 if ours launches too much."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.bench.operations", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--no-table", action="store_true", help="leave the page as it is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables: list[str] = []
    is_good = True
    for title, contenders in CONTENDERS.items():
        counts = {name: count(train) for name, train in contenders.items()}
        tables.append(render(title, counts))
        print(tables[-1], flush=True)
        is_good &= sum(counts["ours"].values()) - sum(counts["bare"].values()) <= LIMIT
    if not arguments.no_table:
        pages.write_table(PAGE, "\n".join(tables), MARKERS)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
