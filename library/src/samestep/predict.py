"""Predict with the model of a run, and print or write a table.

samestep predict runs/mine seven.png photos/
samestep predict runs/mine photos/ --top 3 --format json
samestep predict runs/houses new.csv --output prices.csv

The model predicts by its ``predict_step`` on the ``predict_dataloader`` of its data, which find the
named files in their attribute ``predict_files``. Where the data have ``class_names``, a column for
each class is replaced by the most likely classes and their probabilities.
"""

import csv
import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.command_line import Parser
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Columns = dict[str, list[Any]]
SUFFIXES = (".csv", ".parquet", ".pt")


def main(argv: Sequence[str]) -> int:
    """Print or write what the model predicts.

    Returns:
        0, or 1 if a file could not be read. It is named on stderr, and the others are predicted.
    """
    parser = Parser("samestep predict", __doc__)
    parser.add_run_dir()
    parser.add_argument("files", nargs="*", help="what the predict_dataloader of the data reads")
    text = "most likely classes of each sample; 0: a column for each class"
    parser.add_argument("--top", type=int, default=1, metavar="N", help=text)
    parser.add_ckpt()
    parser.add_accelerator()
    parser.add_argument("--format", choices=["csv", "json"], default="csv", help="on stdout")
    text = ".csv, .parquet, or .pt for tensors of any shape; default: stdout"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    parser.add_data()
    arguments = parser.parse(argv)
    output = arguments.output
    if arguments.top < 0:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 0")
    if output and output.suffix not in SUFFIXES:
        raise ConfigError(f"--output {output}: must end in .csv, .parquet or .pt")
    # These imports take seconds: invalid arguments are reported before.
    from samestep.hydra import saved_run
    from samestep.loading import load_chosen

    model, data = load_chosen(arguments)
    class_names = list(getattr(data, "class_names", []))
    if class_names and arguments.top > len(class_names):
        raise ConfigError(
            f"--top {arguments.top}: must not exceed the {len(class_names)} classes of the run"
        )
    if arguments.files:
        if not hasattr(data, "predict_files"):
            raise ConfigError(
                f"{arguments.files[0]}: {type(data).__name__} takes no files; give it an attribute "
                "predict_files, which its predict_dataloader reads"
            )
        data.predict_files = list(arguments.files)
    batches = saved_run.predict(model, data, arguments.run_dir, arguments.accelerator)
    errors = getattr(data, "predict_errors", [])
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if batches and all(batch is None for batch in batches):
        # The step has written what it wanted.
        print(f"{type(model).__name__}.predict_step returns nothing to write", file=sys.stderr)
    elif output and output.suffix == ".pt":
        import torch

        torch.save(batches, output)
    else:
        if not arguments.top:
            class_names = []
        columns = join(batches, class_names, arguments.top)
        write(columns, output, arguments.format)
    return 1 if errors else 0


def join(batches: Sequence[Any], class_names: Sequence[str], top: int) -> Columns:
    """The columns of all batches, with a row for each sample."""
    columns: Columns = {}
    for batch in batches:
        for name, values in columns_of(batch, class_names, top).items():
            columns.setdefault(name, []).extend(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) > 1:
        raise ConfigError(f"predict_step returns columns of different lengths: {lengths}")
    return columns


def columns_of(
    batch: Any, class_names: Sequence[str] = (), top: int = 1, name: str = "prediction"
) -> Columns:
    """The columns in what ``predict_step`` returns: a tensor, or a dictionary of columns."""
    if isinstance(batch, dict):
        columns: Columns = {}
        for key, value in batch.items():
            columns |= columns_of(value, class_names, top, key)
        return columns
    is_tensor = hasattr(batch, "ndim")
    if isinstance(batch, list | tuple) and name != "prediction":
        return {name: list(batch)}
    if is_tensor and batch.ndim == 1:
        return {name: numbers_of(batch)}
    if is_tensor and batch.ndim == 2:
        if class_names and batch.shape[1] == len(class_names):
            return name_classes(batch, class_names, top, name)
        if batch.shape[1] == 1:
            return {name: numbers_of(batch.flatten())}
        return {f"{name}_{n}": numbers_of(column) for n, column in enumerate(batch.T)}
    what = f"a tensor {list(batch.shape)}" if is_tensor else type(batch).__name__
    raise ConfigError(
        f"predict_step returns {name} as {what}: a table takes tensors [B] or [B, C], or a "
        "dictionary of them; --output FILE.pt keeps any shape, and a predict_step that writes "
        "files itself returns nothing"
    )


def name_classes(scores: "Tensor", class_names: Sequence[str], top: int, name: str) -> Columns:
    """The ``top`` classes with the highest scores of each row ``[B, C]``, the highest first."""
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    columns: Columns = {}
    for rank in range(top):
        number = f"_{rank + 1}" if rank else ""
        columns[f"class{number}"] = [class_names[id] for id in ids[:, rank].tolist()]
        columns[f"{name}{number}"] = numbers_of(values[:, rank])
    return columns


def numbers_of(column: "Tensor") -> list[Any]:
    """Numbers of a tensor, rounded to the seven significant figures of 32 bits."""
    values = column.detach().cpu().tolist()
    return [float(f"{v:.7g}") if isinstance(v, float) else v for v in values]


def write(columns: Columns, output: Path | None, form: str) -> None:
    """Write a row for each sample: into a file, or as CSV or JSON on stdout."""
    if output and output.suffix == ".parquet":
        try:
            pyarrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(f"--output {output}: needs pyarrow; `pip install pyarrow`") from error
        parquet.write_table(pyarrow.table(columns), output)
        return
    rows = list(zip(*columns.values(), strict=True))
    if output is None and form == "json":
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
        return
    opened = output.open("w", encoding="utf-8", newline="") if output else nullcontext(sys.stdout)
    with opened as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)
