"""What each lever buys: an MNIST-format epoch of ours, and the same with one lever undone.

python -m tests.bench.levers gather FOLDER      # one contender, in this process
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.bench import epochs, recipes
from tests.bench.measure import PYTHON, Claim, Row


def index_pixel_by_pixel() -> None:
    from project.data.images import ImageSet, RawBatch

    def batch(self: ImageSet, positions: torch.Tensor) -> RawBatch:
        ids = self.ids[positions]
        return RawBatch(self.source.images[ids], self.source.labels[ids], ids)

    ImageSet.__getitem__ = batch  # type: ignore[method-assign]


def check_by_the_norm() -> None:
    from samestep.callbacks import loss_guard

    loss_guard.are_finite = lambda gradients: False


def search_gpus_in_each_step() -> None:
    from samestep.ranks import lightning_patches

    lightning_patches.search_gpus_once = lambda: None


def call_empty_hooks() -> None:
    from samestep.ranks import lightning_patches

    lightning_patches.skip_empty_hooks = lambda trainer: None


def name_hooks_with_checks() -> None:
    from samestep.ranks import lightning_patches

    lightning_patches.name_hooks_without_checks = lambda: None


def open_sections_of_the_profiler() -> None:
    from lightning.pytorch.profilers import PassThroughProfiler

    from samestep import build

    build.NoProfiler = PassThroughProfiler  # type: ignore[misc]


LEVERS: dict[str, tuple[str, Callable[[], None]]] = {
    "gather": ("batches copied image by image, not pixel by pixel", index_pixel_by_pixel),
    "search": ("no search for GPUs in each step of Adam", search_gpus_in_each_step),
    "hooks": ("no hooks that a callback does not define", call_empty_hooks),
    "names": ("no checks for parameters when a hook is named", name_hooks_with_checks),
    "profiler": ("no sections of a profiler that measures nothing", open_sections_of_the_profiler),
    "guard": ("gradients checked by their sum, not by their norm", check_by_the_norm),
}


def rows(folder: Path) -> Iterator[Row]:
    words = ["-m", "tests.bench.levers"]
    undone = {name: [PYTHON, *words, name, str(folder)] for name in LEVERS}
    yield Row(
        "levers", "what each lever buys, MNIST-format epoch",
        {"ours": epochs.command("ours", "mnist", folder), **undone},
        [Claim(f"without: {says}", name, "ours") for name, (says, _) in LEVERS.items()],
        lambda: recipes.write_tensors("mnist", folder), same_curve=("ours", *LEVERS),
    )  # fmt: skip


if __name__ == "__main__":
    LEVERS[sys.argv[1]][1]()
    sys.argv[1:] = ["ours", "mnist", sys.argv[2]]
    epochs.main()
