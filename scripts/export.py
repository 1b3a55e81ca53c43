"""Write the model of a run in forms that other programs read, each checked against the original.

runs/<run_id>/export/
    model.safetensors, config.yaml  the weights, and what rebuilds the net
    model.pt2, model.onnx           torch.export, and ONNX with --onnx; batches of any size
    README.md                       a model card: metrics, data, command, commit, licence

Images go in as bytes. Any other model sets example_input_array, as Lightning knows it.

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
    parser.add_argument("--onnx", action="store_true", help="write model.onnx too")
    options.add_data_options(parser)
    arguments = parser.parse(argv)
    from project.export import export_run  # imports torch

    model, data = options.load(arguments)
    licence = arguments.licence or licence_of_project()
    differences = export_run(
        arguments.run_dir, model, data, arguments.ckpt, licence, onnx=arguments.onnx
    )
    target = arguments.run_dir / "export"
    print(f"Written to {target}; on real inputs the outputs differ at most by")
    for file, difference in differences.items():
        print(f"  {file:<17}  {difference:.1e}")
    return 0


if __name__ == "__main__":
    options.run(main)
