"""Write the net of a run in forms that other programs read, each checked against the original.

runs/<run_id>/export/
    model.safetensors  the weights of the net
    config.yaml        what rebuilds the net and prepares its images
    model.pt2          a torch.export program, from uint8 images [B, C, H, W], any B, to logits
    README.md          a model card: metrics, data, command, commit, licence

`huggingface_hub.upload_folder` takes the folder as it is. Read the card before you publish it.

python scripts/export.py runs/mine
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import options


def licence_of_project() -> str | None:
    """The licence in pyproject.toml; None in an image, which has no such file."""
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if not path.is_file():
        return None
    licence = tomllib.loads(path.read_text("utf-8"))["project"].get("license")
    return licence if isinstance(licence, str) else None


def main(argv: Sequence[str]) -> int:
    """Write the files, and print how close to the original each one computes. Returns 0."""
    parser = options.make_parser(__doc__)
    options.add_ckpt_option(parser)
    text = "of the weights, as in MIT; default: that of the project"
    parser.add_argument("--licence", metavar="SPDX", help=text)
    options.add_data_options(parser)
    arguments = parser.parse(argv)
    from project.export import NUM_IMAGES, export_run  # imports torch

    model, data = options.load(arguments)
    licence = arguments.licence or licence_of_project()
    differences = export_run(arguments.run_dir, model, data, arguments.ckpt, licence)
    target = arguments.run_dir / "export"
    print(f"Written to {target}; logits of up to {NUM_IMAGES} test images differ at most by")
    for file, difference in differences.items():
        print(f"  {file:<17}  {difference:.1e}")
    return 0


if __name__ == "__main__":
    options.run(main)
