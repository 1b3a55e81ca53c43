"""Write the net of a run in forms that other programs read, each checked against the original.

runs/<run_id>/export/
    model.safetensors  the weights of the net
    config.yaml        what rebuilds the net and prepares its images
    model.pt2          a torch.export program, from uint8 images [B, C, H, W], any B, to logits

python scripts/export.py runs/digits-cnn-3f2a1b
"""

import argparse
from typing import Any

import options

from samestep.ranks import process


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.make_parser(__doc__)
    parser.add_argument("--ckpt", choices=["best", "last"], default="best")
    options.add_data_options(parser)
    return parser


def main(arguments: Any) -> int:
    """Write the files, and print how close to the original each one computes."""
    from project.export import NUM_IMAGES, export_run  # imports torch

    model, data = options.load(arguments)
    differences = export_run(arguments.run_dir, model, data)
    target = arguments.run_dir / "export"
    print(f"Written to {target}; logits of up to {NUM_IMAGES} test images differ at most by")
    for file, difference in differences.items():
        print(f"  {file:<17}  {difference:.1e}")
    return 0


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
