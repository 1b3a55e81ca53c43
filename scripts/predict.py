"""Predict with the model of a run: name what is in image files, or write a table.

python scripts/predict.py runs/mine seven.png
python scripts/predict.py runs/mine photos/ --top 3 --format json
python scripts/predict.py runs/houses new.csv --output prices.csv

The classifier of images takes image files. Every other model predicts by its own `predict_step` on
the `predict_dataloader` of its data, which get the named files as their attribute `predict_files`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import options

from samestep.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print or write what the model predicts.

    Returns:
        0, or 1 if an image could not be read.
    """
    parser = options.make_parser(__doc__)
    parser.add_argument("files", nargs="*", help="image files, folders of them, or other data")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="classes for each image")
    options.add_model_options(parser)
    parser.add_argument("--format", choices=["table", "json"], default="table", help="of images")
    text = ".csv, .parquet, or .pt for tensors of any shape; default: CSV on stdout"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    options.add_data_options(parser)
    arguments = parser.parse(argv)
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 1")
    if arguments.output and arguments.output.suffix not in (".csv", ".parquet", ".pt"):
        raise ConfigError(f"--output {arguments.output}: must end in .csv, .parquet or .pt")
    model, data = options.load(arguments)  # imports torch: wrong usage is reported before
    files, accelerator = arguments.files, arguments.accelerator
    known = sys.modules.get("project.model.classifier")  # imported, if the model is of this kind
    if known and isinstance(model, known.ImageClassifier):
        from project import predict

        return predict.main(model, data, files, arguments.top, arguments.format, accelerator)
    from project import table

    table.predict(model, data, arguments.run_dir, files, arguments.output, accelerator)
    return 0


if __name__ == "__main__":
    options.run(main)
