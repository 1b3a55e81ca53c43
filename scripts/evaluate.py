"""Test or validate the model of a run again.

python scripts/evaluate.py runs/digits-cnn-3f2a1b
python scripts/evaluate.py runs/digits-cnn-3f2a1b --split val --ckpt last --format json
"""

import argparse
import json
import math
import sys
from typing import Any

import options

from samestep.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.make_parser(__doc__)
    parser.add_argument("--split", choices=["test", "val"], default="test")
    parser.add_argument("--ckpt", choices=["best", "last"], default="best")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options.add_data_options(parser)
    return parser


def main(arguments: Any) -> int:
    """Print the metrics of one split, computed in one process over all its images.

    They equal those of the run to the last bit if the run had one process too, on the same machine
    and kind of device, and left no images out.

    Raises:
        ConfigError: if this machine has no such accelerator.
    """
    import lightning as L  # takes seconds: wrong usage is reported before
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from project.saved_run import read_saved_config

    model, data = options.load(arguments)
    try:
        trainer = L.Trainer(
            accelerator=arguments.accelerator,
            devices=1,
            precision=read_saved_config(arguments.run_dir).trainer.precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"--accelerator {arguments.accelerator}: {error}") from error
    loop = trainer.test if arguments.split == "test" else trainer.validate
    metrics = loop(model, datamodule=data, verbose=False)[0]
    if arguments.format == "table":
        loader = data.test_dataloader() if arguments.split == "test" else data.val_dataloader()
        what = f"{len(loader.dataset)} {arguments.split} images"
        print(f"{arguments.run_dir}, {arguments.ckpt} checkpoint, {what}")
    print_metrics(metrics, arguments.format)
    return 0


def print_metrics(metrics: dict[str, float], form: str) -> None:
    """Print a table, or JSON in which nan and infinity are null because JSON cannot hold them."""
    unusable = [name for name, value in metrics.items() if not math.isfinite(value)]
    if unusable:
        print(f"warning: nan or infinite: {', '.join(unusable)}", file=sys.stderr)
    if form == "json":
        finite = {name: None if name in unusable else value for name, value in metrics.items()}
        print(json.dumps(finite, indent=2))
        return
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")


if __name__ == "__main__":
    sys.exit(options.run(main, options.parse(make_parser())))
