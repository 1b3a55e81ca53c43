"""Every row of the table: what is measured, and what must hold."""

from pathlib import Path

from labs.bench import commands, saves, tables
from labs.bench.epochs import LEVERS
from labs.bench.loading import write_photos
from labs.bench.measure import Row

FUNCTION = "-m labs.bench.contender"
EPOCHS, LOADING, COMMANDS, TABLES = (
    f"{FUNCTION} {name}" for name in ("epochs", "loading", "commands", "tables")
)
TWO = "-m torch.distributed.run --standalone --nproc-per-node=2 "


def all_rows(folder: Path) -> list[Row]:
    """Their files are written into ``folder`` when they are measured."""
    return [
        *rows_of_epochs(), *rows_of_images(folder), *rows_of_tables(folder),
        *rows_of_commands(folder),
    ]  # fmt: skip


def rows_of_epochs() -> list[Row]:
    """Contenders of one row that give their losses must have the same ones."""
    levers = {name: f"{EPOCHS}:ours mnist {name}" for name in LEVERS}
    what = "; ".join(f"{name}: {how}" for name, (how, *_) in LEVERS.items())
    return [
        Row(
            "step", "step: linear 20 to 10, batch 32",
            {"bare": f"{EPOCHS}:bare_linear", "ours": f"{EPOCHS}:ours linear"},
            ["ours - bare <= 0.4"], "ms a step",  # of which an epoch has 1,000
        ),
        Row(
            "mnist", "MNIST-format epoch",
            {"bare": f"{EPOCHS}:bare mnist", "plain-lightning": f"{EPOCHS}:plain_lightning mnist",
             "ours": f"{EPOCHS}:ours mnist",
             "textbook-lightning": f"{EPOCHS}:textbook_lightning mnist"},
            ["ours / bare <= 1.3", "plain-lightning / bare", "textbook-lightning / ours >= 5"],
        ),
        Row(
            "cifar", "CIFAR-format epoch",
            {"bare": f"{EPOCHS}:bare cifar", "ours": f"{EPOCHS}:ours cifar",
             "textbook-ddp": f"{EPOCHS}:textbook_ddp cifar"},
            ["ours / bare <= 1.1", "textbook-ddp / ours >= 1.5"],
        ),
        Row(
            "ranks", "CIFAR-format epoch on 1 and 2 ranks of one thread, 2 cores",
            {"bare-1": f"{EPOCHS}:bare cifar", "bare-2": f"{TWO}{EPOCHS}:bare cifar",
             "ours-1": f"{EPOCHS}:ours cifar", "ours-2": f"{TWO}{EPOCHS}:ours cifar"},
            ["ours-2 / bare-2 <= 1.15", "ours-1 / ours-2 >= 1.7", "bare-1 / bare-2"],
        ),
        Row(
            "growth", "memory after 50 epochs / after 10",
            {"ours": f"{EPOCHS}:growth"}, ["ours <= 1.02"],
        ),
        Row(
            "gpu-resnet", "GPU: ResNet-18, bf16, compiled",
            {"bare": f"{EPOCHS}:bare gpu-resnet", "ours": f"{EPOCHS}:ours gpu-resnet"},
            ["bare / ours >= 0.95"], needs_gpu=True,
        ),
        Row(
            "gpu-guide", "GPU: net of guide D, an epoch of 50 k images",
            {"bare": f"{EPOCHS}:bare gpu-guide", "ours": f"{EPOCHS}:ours gpu-guide"},
            ["ours", "bare"], "s", needs_gpu=True,
        ),
        Row(
            "gpu-deterministic", "GPU: ResNet-18, bf16, compiled: trainer.deterministic=true",
            {"default": f"{EPOCHS}:timed gpu-resnet",
             "deterministic": f"{EPOCHS}:timed gpu-resnet trainer.deterministic=true"},
            ["deterministic / default"], needs_gpu=True,
        ),
        Row(
            "levers", f"MNIST-format epoch, without: {what}",
            {"ours": f"{EPOCHS}:ours mnist", **levers}, [f"{name} / ours" for name in LEVERS],
        ),
    ]  # fmt: skip


def rows_of_images(folder: Path) -> list[Row]:
    """Images on their way into a batch."""
    decode = f"{LOADING}:decode {folder}"
    return [
        Row(
            "pipeline", "input pipeline: CIFAR crop, flip, normalize, for an image and core",
            {"memory": f"{LOADING}:memory"}, ["memory <= 20"], "us",
        ),
        Row(
            "jpeg", "JPEGs of 500 px to 224 px, for an image: data=folder, and loops over decoders",
            {"pillow": f"{decode} pillow", "folder": f"{LOADING}:folder {folder}",
             "torchvision": f"{decode} torchvision"},
            ["pillow / folder >= 0.9", "torchvision / folder"],
            prepare=lambda: write_photos(folder),
        ),
    ]  # fmt: skip


def rows_of_tables(folder: Path) -> list[Row]:
    """Data that need not fit in memory."""
    others = tables.installed()
    names = ["lance", "blocks", *others]
    lacks = "" if (tables.SERVERS / "slow").exists() else "skipped: no server built"
    return [
        *(
            Row(
                f"lance-{size}", f"Lance, local, random order, {size} px",
                {name: f"{TABLES}:read {folder} {size} {name}" for name in names},
                ["lance", "blocks", *(f"{name} / blocks >= 1" for name in others)], "us an image",
                prepare=lambda size=size: tables.write_images(folder, size),
            )
            for size in ("32", "224")
        ),
        *(
            Row(
                f"lance-s3-{size}",
                f"Lance, S3, {tables.LATENCY} a request, first pass, {size} px",
                # The server works on the same processors: `discard` only throws its bytes away.
                {"local": f"{TABLES}:read_once {folder} {size} blocks local",
                 "discard": f"{TABLES}:discard {folder} {size}"}
                | {name: f"{TABLES}:read_once {folder} {size} {name} far"
                   for name in names[1:]},
                [*(f"{name} / blocks >= 0.9" for name in ["local", *others]), "discard / local"],
                prepare=lambda size=size: tables.write_images(folder, size),
                lacks=lacks,
            )
            for size in ("32", "224")
        ),
        Row(
            "lance-jpeg", "Lance, S3, first pass, decoded by data=lance",
            {f"{where}-{size}": f"{TABLES}:decode {folder} {size} {where}"
             for size in tables.PICTURES for where in ("local", "far")},
            [f"local-{size} / far-{size} >= 0.9" for size in tables.PICTURES],
            prepare=lambda: tables.write_pictures(folder),
            lacks=lacks,
        ),
        Row(
            "memory", "memory of a pass over 655 MB and 66 MB, without pages of files",
            {f"{kind}-{count}": f"{TABLES}:held {folder} {kind} {count}"
             for kind in ("lance", "hf", "tokens") for count in tables.LARGE},
            [f"{kind}-10 / {kind}-1 <= 1.1" for kind in ("lance", "hf", "tokens")],
            prepare=lambda: tables.write_large(folder),
        ),
        Row(
            "lance-start", "Lance: from the start to the second batch, 10^4 and 10^8 rows",
            {name: f"{TABLES}:start {folder} {name}" for name in tables.ROWS},
            ["rows-8 / rows-4 <= 1.5"], prepare=lambda: tables.write_rows(folder),
        ),
    ]  # fmt: skip


def rows_of_commands(folder: Path) -> list[Row]:
    """What a person waits for."""
    train, listing = commands.train(folder / "started"), f"-m samestep runs {folder}"
    return [
        Row(
            "start", "start: to the first optimizer step",
            {"import": commands.IMPORT, "ours": train}, ["ours - import <= 0.7"], "s",
        ),
        Row(
            "answers", "help, config error, render: no torch", commands.ANSWERS,
            [f"{name} <= 0.8" for name in commands.ANSWERS], "s",
        ),
        Row(
            "save", "checkpoint of 76 MB, and memcpy, write, fsync",
            {"save": f"{COMMANDS}:save", "copy": f"{COMMANDS}:copy"}, ["save / copy <= 1.2"],
        ),
        *(
            Row(
                f"background-{size}",
                f"save of {size} MB in the background: what training waits for",
                {name: f"-m labs.bench.contender saves:{name} {size}"
                 for name in ("ours", "lightning", "dcp", "waits")},
                ["lightning / ours >= 1", "dcp / ours >= 1", "waits / ours"],
            )
            for size in saves.WIDTHS
        ),
        Row(
            "shards",
            "sharded save of 1 GB on 2 ranks: training waits (held), all is on the disk (whole); "
            "write and fsync of half by one rank, by both",
            {"held": f"{TWO}{COMMANDS}:shards held", "whole": f"{TWO}{COMMANDS}:shards whole",
             "half": f"{COMMANDS}:half", "halves": f"{TWO}{COMMANDS}:half"},
            ["held / half <= 1.2", "whole / halves"],
        ),
        Row(
            "logging", "logging, share of an MNIST-format epoch",
            {"ours": f"{COMMANDS}:logging"}, ["ours <= 1"], "%",
        ),
        Row(
            "receipts", "receipts, share of an MNIST-format epoch",
            {"ours": f"{COMMANDS}:receipts"}, ["ours <= 1"], "%",
        ),
        Row(
            "sigkill", "restart after SIGKILL, in place: from the kill to the next step",
            {"import": commands.IMPORT, "ours": commands.killed_once(folder)},
            ["ours - import <= 2"], "s",
        ),
        Row(
            "runs", "start with 1 and with 10,000 runs in runs/",
            {str(count): commands.train(folder / f"runs-{count}") for count in (1, 10_000)},
            ["10000 / 1"], prepare=lambda: commands.write_runs(folder, "runs", 1, 10_000),
        ),
        Row(
            "list", "list 10 and 10,000 runs with samestep runs",
            {"10": f"{listing}/list-10", "10000": f"{listing}/list-10000"},
            ["10000 / 10"],
            prepare=lambda: commands.write_runs(folder, "list", 10, 10_000),
        ),
        Row(
            "data", "start: 6 k, 60 k and 600 k images of 28 px",
            {size: f"{COMMANDS}:first_step_with {size} {folder}" for size in commands.DATA_SIZES},
            ["data-10 - data-1", "data-100 - data-1"], "s",
        ),
    ]  # fmt: skip
