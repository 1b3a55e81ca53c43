"""Every row of the table: what is measured, and what must hold."""

import shutil
from pathlib import Path

from tests.bench import commands, sets
from tests.bench.measure import Row

LEVERS = {
    "gather": "batches copied image by image", "search": "no search for GPUs in each step",
    "hooks": "no empty hooks", "names": "hooks named without checks",
    "profiler": "no sections of a profiler",
    "guard": "gradients checked by their sum",
}  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def all_rows(folder: Path) -> list[Row]:
    """Their images are written into ``folder`` when they are measured."""

    def contender(module: str, function: str, *words: str) -> list[str]:
        return ["-m", "tests.bench.contender", module, function, *words]

    def epoch(function: str, task: str, *more: str) -> list[str]:
        return contender("epochs", function, task, str(folder), *more)

    def on_ranks(count: int, function: str) -> list[str]:
        return [*TORCHRUN, f"--nproc-per-node={count}", *epoch(function, "cifar")]

    def write(*tasks: str) -> list[None]:
        return [sets.write_tensors(task, folder) for task in tasks]

    def loading(*names: str) -> dict[str, list[str]]:
        return {name: contender("loading", name, str(folder)) for name in names}

    def start(*names: str) -> dict[str, list[str]]:
        return {name: contender("commands", "first_step", str(folder), name) for name in names}

    gpu_pair = ("bare", "ours")
    return [
        Row(
            "step", "step: linear 20 to 10, batch 32",
            {"bare": epoch("bare", "linear"), "ours": epoch("ours", "linear")},
            ["ours - bare <= 0.4"], "ms a step", same_curve=("bare", "ours"),
        ),
        Row(
            "mnist", "MNIST-format epoch",
            {"bare": epoch("bare", "mnist"), "plain-lightning": epoch("ours", "mnist", "callbacks"),
             "ours": epoch("ours", "mnist"),
             "textbook-lightning": epoch("textbook_lightning", "mnist")},
            ["ours / bare <= 1.4", "plain-lightning / bare", "textbook-lightning / ours >= 5"],
            prepare=lambda: write("mnist"), same_curve=("bare", "plain-lightning", "ours"),
        ),
        Row(
            "cifar", "CIFAR-format epoch",
            {"bare": epoch("bare", "cifar"), "ours": epoch("ours", "cifar"),
             "textbook-ddp": epoch("textbook_ddp", "cifar")},
            ["ours / bare <= 1.1", "textbook-ddp / ours >= 1.5"],
            prepare=lambda: write("cifar"), same_curve=("bare", "ours"),
        ),
        Row(
            "ranks", "CIFAR-format epoch on 1, 2 and 4 ranks of one thread, 2 cores",
            {"bare-1": epoch("bare", "cifar"), "bare-2": on_ranks(2, "bare"),
             "ours-1": epoch("ours", "cifar"), "ours-2": on_ranks(2, "ours"),
             "ours-4": on_ranks(4, "ours")},
            ["ours-2 / bare-2 <= 1.15", "ours-1 / ours-2 >= 1.7", "bare-1 / bare-2",
             "ours-1 / ours-4"],
            prepare=lambda: write("cifar"), same_curve=("bare-2", "ours-2"),
        ),
        Row(
            "growth", "memory after 50 epochs / after 10",
            {"ours": contender("epochs", "growth", str(folder))}, ["ours <= 1.02"],
        ),
        Row(
            "gpu-resnet", "GPU: ResNet-18, bf16, compiled",
            {name: epoch(name, "gpu-resnet") for name in gpu_pair}, ["bare / ours >= 0.95"],
            prepare=lambda: write("gpu-resnet"), same_curve=gpu_pair, needs_gpu=True,
        ),
        Row(
            "gpu-guide", "GPU: net of guide D, an epoch of 50 k images",
            {name: epoch(name, "gpu-guide") for name in gpu_pair}, ["ours", "bare"], "s",
            prepare=lambda: write("gpu-guide"), same_curve=gpu_pair, needs_gpu=True,
        ),
        Row(
            "pipeline", "input pipeline: CIFAR crop, flip, normalize, for an image and core",
            loading("memory"), ["memory <= 20"], "us", prepare=lambda: write("cifar"),
        ),
        Row(
            "jpeg", "JPEGs of 500 px to 224 px, for an image: data=folder, and loops over decoders",
            loading("simplejpeg", "folder", "pillow", "torchvision"),
            ["simplejpeg / folder >= 0.9", "pillow / simplejpeg", "torchvision / simplejpeg"],
            prepare=lambda: sets.write_photos(folder),
        ),
        Row(
            "start", "start: to the first optimizer step",
            {"import": commands.IMPORT, "ours": commands.train(folder / "started")},
            ["ours - import <= 0.7"], "s",
        ),
        Row(
            "answers", "help, config error, render: no torch", commands.ANSWERS,
            [f"{name} <= 0.8" for name in commands.ANSWERS], "s", commands.without_torch,
        ),
        Row(
            "save", "checkpoint of 76 MB, and memcpy, write, fsync",
            {"save": contender("commands", "save", str(folder)),
             "copy": contender("commands", "copy", str(folder))},
            ["save / copy <= 1.2"], prepare=lambda: write("tiny"),
        ),
        Row(
            "logging", "logging, share of an MNIST-format epoch",
            {"ours": contender("commands", "logging", str(folder))}, ["ours <= 1"], "%",
            lambda: write("mnist"),
        ),
        Row(
            "sigkill", "restart after SIGKILL, in place: from the kill to the next step",
            {"import": commands.IMPORT, "ours": commands.killed_once(folder)},
            ["ours - import <= 2"], "s",
            lambda: shutil.rmtree(folder / "restarted", ignore_errors=True),
        ),
        Row(
            "runs", "start with 1 and with 10,000 runs in runs/",
            {str(count): commands.train(folder / f"runs-{count}") for count in (1, 10_000)},
            ["10000 / 1"],
            prepare=lambda: [sets.write_runs(folder, count) for count in (1, 10_000)],
        ),
        Row(
            "data", "start: 6 k, 60 k and 600 k images of 28 px",
            start("data-1", "data-10", "data-100"), ["data-10 - data-1", "data-100 - data-1"], "s",
            lambda: [sets.write_images(f"data-{size}", folder) for size in (1, 10, 100)],
        ),
        Row(
            "levers", "MNIST-format epoch, without: "
            + "; ".join(f"{name}: {what}" for name, what in LEVERS.items()),
            {"ours": epoch("ours", "mnist")}
            | {name: epoch("ours", "mnist", name) for name in LEVERS},
            [f"{name} / ours" for name in LEVERS],
            prepare=lambda: write("mnist"), same_curve=("ours", *LEVERS),
        ),
    ]  # fmt: skip
