"""What virtual ranks cost: processor time of a step with V slices, for one without, in turn.

python -m labs.bench.slices                  # three nets on 1 and 2 ranks; ten minutes on two cores
python -m labs.bench.slices cnn --repeats 5  # one net, more often

Processor time of rank zero, because ranks that wait for each other share the noise of the machine.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from labs.bench.measure import run, say

NUM_STEPS = 40  # of an epoch; the first epoch warms up
NETS = {"mlp": 512, "cnn": 256, "wide": 64}
"""Samples of a step; ``wide`` has 5.8 million weights, and its time is memory."""
SLICES = {1: (1, 2, 4, 8), 2: (2, 4)}
"""By the number of ranks."""


def make_net(name: str) -> Any:
    """A net for images of 28 x 28."""
    from torch import nn

    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    if name == "wide":
        layers = nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2048, 10))
    first = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(6, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(16 * 14 * 14, 10))


def train(run_dir: Path, name: str, slices: int) -> None:
    """Train on this rank; rank zero gives the processor time of a step."""
    import lightning as L
    import torch
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    from samestep import BatchLoader, Trainer

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(name)
            self.ends: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.process_time())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    samples = NETS[name] * NUM_STEPS
    data = TensorDataset(torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,)))
    trainer = Trainer(
        run_dir=run_dir, virtual_ranks=slices or None, max_epochs=4, accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, save_every_s=1e9,
        allow=["loss", "random_numbers", "batch_norm"],
    )  # fmt: skip
    torch.set_num_threads(1)
    net = Net()
    trainer.fit(net, BatchLoader(data, NETS[name]))
    if trainer.is_global_zero:
        seconds = sorted(end - start for start, end in pairwise(net.ends[NUM_STEPS:]))
        # A low quantile: other processes only add to it.
        say(value=seconds[len(seconds) // 5])


def measure(name: str, num_ranks: int, repeats: int) -> str:
    """One line: a step without virtual ranks, and how much longer one takes with them."""
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={num_ranks} "
    found: dict[int, list[float]] = {slices: [] for slices in (0, *SLICES[num_ranks])}
    for _ in range(repeats):
        for slices, values in found.items():
            with tempfile.TemporaryDirectory() as folder:
                options = f"{name} --slices {slices} --run-dir {folder}"
                start = launcher if num_ranks > 1 else ""
                values.append(run(f"{start}-m labs.bench.slices {options}")["value"])
    before = found.pop(0)
    ratios = []
    for slices, values in found.items():
        pairs = [value / base for value, base in zip(values, before, strict=True)]
        ratios.append(f"{slices} slices {statistics.median(pairs):.2f}x")
    step = statistics.median(before) * 1e3
    return f"{name}, {num_ranks} ranks: {step:.2f} ms; {', '.join(ratios)} (n {repeats})"


def main() -> None:
    """Measure each net; a rank of a measurement trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*NETS, []], help="nets; without any: all")
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turn (3)")
    parser.add_argument("--slices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_dir:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        train(arguments.run_dir, arguments.names[0], arguments.slices)
        return
    for name in arguments.names or NETS:
        for num_ranks in SLICES:
            print(measure(name, num_ranks, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
