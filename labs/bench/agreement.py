"""What it costs that all ranks agree before each step: epochs with and without, in turn.

python -m labs.bench.agreement                # 2 and 8 ranks with gloo; five minutes on two cores
python -m labs.bench.agreement --ranks 2 --pairs 20

One run trains a net with one hidden layer; in every other epoch the all-reduce is left out. So both
kinds of epoch share processes, data and the noise of the machine, and the ratio of neighbours is
what the agreement costs.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from labs.bench.measure import run, say

NUM_STEPS = 100  # of an epoch
BATCH = 64  # samples per step, on each rank
WIDTH = 256  # of the hidden layer; the step of one rank takes about a millisecond


def train(run_dir: Path, num_pairs: int) -> None:
    """Train on this rank; rank zero gives the seconds of each epoch."""
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from samestep import Trainer
    from samestep.ranks import stopping

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    agreed = stopping.agreed
    is_left_out = False
    seconds: list[float] = []

    def agreed_or_not(**wishes: bool) -> stopping.Agreement:
        return stopping.Agreement() if is_left_out else agreed(**wishes)

    class Clock(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            nonlocal is_left_out
            is_left_out = trainer.current_epoch % 2 == 1
            trainer.strategy.barrier()
            self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seconds.append(time.perf_counter() - self.start)

    num_ranks = int(os.environ["WORLD_SIZE"])
    samples = NUM_STEPS * BATCH * num_ranks
    data = TensorDataset(torch.rand(samples, 784), torch.randint(10, (samples,)))
    trainer = Trainer(
        run_dir=run_dir, max_epochs=2 * num_pairs + 2, accelerator="cpu", callbacks=[Clock()],
        enable_progress_bar=False, enable_model_summary=False, save_every_s=1e9,
    )  # fmt: skip
    with mock.patch.object(stopping, "agreed", agreed_or_not):
        trainer.fit(Net(), DataLoader(data, BATCH))
    if trainer.is_global_zero:
        say(seconds=seconds)


def measure(num_ranks: int, num_pairs: int) -> str:
    """One line: how long an epoch takes with the agreement, as a multiple of one without."""
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={num_ranks}"
    with tempfile.TemporaryDirectory() as folder:
        options = f"--run-dir {folder} --pairs {num_pairs}"
        result = run(f"{torchrun} -m labs.bench.agreement {options}")
    seconds = result["seconds"][2:]  # the first two warm up
    pairs = list(zip(seconds[::2], seconds[1::2], strict=True))
    ratios = sorted(with_it / without for with_it, without in pairs)
    difference = statistics.median(a - b for a, b in pairs) / NUM_STEPS * 1e6
    step = statistics.median(without for _, without in pairs) / NUM_STEPS * 1e3
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return (
        f"{num_ranks} ranks: {statistics.median(ratios):.3f} times (quartiles {low:.3f} to "
        f"{high:.3f}, n {len(ratios)}), {difference:.0f} us of a step of {step:.2f} ms"
    )


def main() -> None:
    """Measure each number of ranks; a rank of a measurement trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of epochs (15)")
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run_dir:
        train(arguments.run_dir, arguments.pairs)
        return
    for num_ranks in arguments.ranks:
        print(measure(num_ranks, arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
