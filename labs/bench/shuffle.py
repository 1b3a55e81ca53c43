"""How well Blocks shuffles, beside a full shuffle: where samples move to, and what a net learns.

python -m labs.bench.shuffle               # 10 seeds: the table of results.md, in two minutes
python -m labs.bench.shuffle --seeds 3

An MLP learns the digits in 20 epochs of 23 batches of 60. Their rows are mixed, as convert.py
writes them, or sorted by class, which is the worst that can happen.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from project.data import digits
from samestep.data.order import Blocks, make_order
from samestep.data.seeds import generator

BATCH = 60
ORDERS: dict[str, bool | Blocks] = {
    "all samples": True,
    "16 blocks of 20 (a fifth of the data)": Blocks(20, 16),
    "4 blocks of 20": Blocks(20, 4),
    "1 block of 60, a batch": Blocks(60, 1),
    "none": False,
}


def displacement(order: bool | Blocks, num: int = 10**5) -> float:
    """Mean way of a sample from its place in the data, as a share of all: 1/3 if fully mixed."""
    size = order._replace(size=num * order.size // 1437) if isinstance(order, Blocks) else order
    places = torch.cat([make_order(num, size, 0, epoch)(0, num) for epoch in range(50)])
    return float((places.view(50, num) - torch.arange(num)).abs().double().mean()) / num


def losses(order: bool | Blocks, rows: str, seed: int, epochs: int) -> list[float]:
    """Loss of the test images after each epoch."""
    train, test = (digits(None, is_train, download=False) for is_train in (True, False))
    images, labels = map(torch.as_tensor, (train.data, train.targets))
    way = torch.randperm(len(labels), generator=generator(0))
    if rows == "sorted":
        way = way[labels[way].argsort(stable=True)]
    images, labels = images[way], labels[way]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    num = len(labels) // BATCH * BATCH

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(net(images.float() / 128 - 0.6), labels)

    found = []
    for epoch in range(epochs):
        for ids in make_order(len(labels), order, seed, epoch)(0, num).split(BATCH):
            optimizer.zero_grad()
            loss_of(images[ids], labels[ids]).backward()
            optimizer.step()
        with torch.inference_mode():
            found.append(loss_of(*map(torch.as_tensor, (test.data, test.targets))).item())
    return found


def interval(values: Any) -> str:
    """Mean and 95 % interval of Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):.3f} ± {half:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m labs.bench.shuffle", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    early = min(5, chosen.epochs)
    print("| mixed at a time | displacement | loss, rows mixed | rows sorted by class |")
    print("|---|---|---|---|")
    print(f"| | | epoch {early}, {chosen.epochs} | epoch {early}, {chosen.epochs} |")
    for name, order in ORDERS.items():
        cells = [f"{displacement(order):.3f}"]
        for rows in ("mixed", "sorted"):
            seeds = range(chosen.seeds)
            curves = np.array([losses(order, rows, seed, chosen.epochs) for seed in seeds])
            cells.append(
                ", ".join(interval(curves[:, epoch - 1]) for epoch in (early, chosen.epochs))
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
