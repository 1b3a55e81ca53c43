"""Predict with the model of a run: name what is in image files, or write a table.

python scripts/predict.py runs/mine seven.png
python scripts/predict.py runs/mine photos/ --top 3 --format json
python scripts/predict.py runs/houses new.csv --output prices.csv

The classifier of images takes image files. Every other model predicts by its own `predict_step` on
the `predict_dataloader` of its data, which get the named files as their attribute `predict_files`.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import options

from samestep.errors import ConfigError

Columns = dict[str, list[Any]]


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
    known = sys.modules.get("project.model.classifier")  # imported, if the model is of this kind
    if known and isinstance(model, known.ImageClassifier) and not arguments.output:
        return name_images(model, data, arguments)
    from samestep.hydra import saved_run

    if arguments.files:
        if not hasattr(data, "predict_files"):
            name = type(data).__name__
            raise ConfigError(
                f"{arguments.files[0]}: {name} takes no files; give it an attribute predict_files, "
                "which its predict_dataloader reads"
            )
        data.predict_files = arguments.files
    batches = saved_run.predict(model, data, arguments.run_dir, arguments.accelerator)
    if all(batch is None for batch in batches):
        print(f"{type(model).__name__}.predict_step returns nothing to write", file=sys.stderr)
        return 0
    write(batches, arguments.output)
    return 0


def name_images(model: Any, data: Any, arguments: Any) -> int:
    """Print the most likely classes of each image file. Returns 1 if one could not be read."""
    import torch

    from project.predict import find_images, print_guesses

    if not arguments.files:
        raise ConfigError("there is nothing to predict; name image files, or directories of them")
    files = find_images(arguments.files)
    has_accelerator = torch.accelerator.is_available()
    if arguments.accelerator == "gpu" and not has_accelerator:
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if arguments.accelerator != "cpu" and has_accelerator:
        model.to(torch.accelerator.current_accelerator())
    return print_guesses(model, data, files, arguments.top, arguments.format == "json")


def write(batches: list[Any], output: Path | None) -> None:
    """Write a row for each sample; ``None`` prints them."""
    if output and output.suffix == ".pt":
        import torch

        torch.save(batches, output)
        return
    columns: Columns = {}
    for batch in batches:
        for name, values in columns_of(batch).items():
            columns.setdefault(name, []).extend(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) > 1:
        raise ConfigError(f"predict_step returns columns of unlike length: {lengths}")
    if output and output.suffix == ".parquet":
        write_parquet(columns, output)
        return
    with output.open("w", encoding="utf-8", newline="") if output else sys.stdout as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))


def write_parquet(columns: Columns, output: Path) -> None:
    """Write a Parquet file by pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"--output {output}: needs pyarrow; `pip install pyarrow`") from error
    parquet.write_table(pyarrow.table(columns), output)


def columns_of(batch: Any, name: str = "prediction") -> Columns:
    """The columns in what ``predict_step`` returns: a tensor, or a dictionary of columns."""
    if isinstance(batch, dict):
        return {k: v for key, value in batch.items() for k, v in columns_of(value, key).items()}
    shape = list(getattr(batch, "shape", []))
    if len(shape) == 1 or shape[1:] == [1]:
        return {name: numbers(batch.flatten())}
    if len(shape) == 2:
        return {f"{name}_{n}": numbers(column) for n, column in enumerate(batch.T)}
    if isinstance(batch, list | tuple) and name != "prediction":
        return {name: list(batch)}
    raise ConfigError(
        f"predict_step returns {name} as {type(batch).__name__} {shape or ''}: a table takes "
        "tensors [B] or [B, C], or a dictionary of them; --output FILE.pt keeps any shape, and a "
        "predict_step that writes files itself returns nothing"
    )


def numbers(column: Any) -> list[Any]:
    """Numbers of a tensor, those of 32 bits with the seven digits that they hold."""
    values: list[Any] = column.detach().cpu().tolist()
    return [float(f"{v:.7g}") if isinstance(v, float) else v for v in values]


if __name__ == "__main__":
    options.run(main)
