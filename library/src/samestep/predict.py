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
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from samestep.command_line import Parser
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Columns = dict[str, list[Any]]


def main(argv: Sequence[str]) -> int:
    """Print or write what the model predicts. Returns 0."""
    arguments = parse(argv)
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
        set_files(data, arguments.files)
    batches = saved_run.predict(model, data, arguments.run_dir, arguments.accelerator)
    if not batches:
        raise ConfigError("there is nothing to predict; name files, or folders of them")
    if all(batch is None for batch in batches):
        # The step has written its results itself, such as one file for each sample.
        print(f"{type(model).__name__}.predict_step returns nothing to write", file=sys.stderr)
        return 0
    if arguments.format == ".pt":
        save(batches, arguments.output)
        return 0
    if arguments.top == 0:
        class_names = []
    columns = join(batches, class_names, arguments.top)
    WRITERS[arguments.format](columns, arguments.output)
    return 0


def parse(argv: Sequence[str]) -> Namespace:
    """The arguments; a ConfigError if one is invalid. A file's suffix becomes its ``format``."""
    parser = Parser("samestep predict", __doc__)
    parser.add_run_dir()
    parser.usage = f"{parser.prog} [options] run_dir [file ...]"
    text = "what the predict_dataloader of the data reads; default: what it reads by itself"
    parser.add_argument("files", nargs="*", metavar="file", help=text)
    text = "most likely classes of each sample; 0: a column for each class; default: 1"
    parser.add_argument("--top", type=int, default=1, metavar="N", help=text)
    parser.add_ckpt()
    parser.add_accelerator()
    text = "of stdout; default: csv"
    parser.add_argument("--format", choices=["csv", "json"], default="csv", help=text)
    text = "write .csv, .parquet, or .pt with a list of what each batch gave; default: print"
    parser.add_argument("--output", type=Path, metavar="FILE", help=text)
    parser.add_data()
    arguments = parser.parse(argv)
    if arguments.top < 0:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 0")
    output = arguments.output
    if output is not None:
        arguments.format = output.suffix
        if output.suffix not in (".pt", *WRITERS):
            raise ConfigError(f"--output {output}: must end in .csv, .parquet or .pt")
    return arguments


def set_files(data: Any, files: Sequence[str]) -> None:
    """Tell the data which files to predict."""
    # Without the attribute the files would be ignored, and the test set predicted in their place.
    if not hasattr(data, "predict_files"):
        raise ConfigError(
            f"{files[0]}: {type(data).__name__} takes no files; give it an attribute "
            "predict_files, which its predict_dataloader reads"
        )
    data.predict_files = list(files)


def join(batches: Sequence[Any], class_names: Sequence[str], top: int) -> Columns:
    """The columns of all batches, with a row for each sample."""
    columns: Columns = {}
    for batch in batches:
        for name, values in columns_of(batch, class_names, top).items():
            columns.setdefault(name, []).extend(values)
    lengths = {name: len(values) for name, values in columns.items()}
    # Rows of such a table would belong to different samples.
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"predict_step returns columns of different lengths: {lengths}")
    return columns


def columns_of(batch: Any, class_names: Sequence[str] = (), top: int = 1) -> Columns:
    """The columns in what ``predict_step`` returns: a tensor, or a dictionary of columns."""
    if not isinstance(batch, dict):
        # A list could be several samples or several outputs, so it needs a name to be a column.
        if isinstance(batch, list | tuple):
            raise no_column("prediction", batch)
        batch = {"prediction": batch}
    columns: Columns = {}
    for name, value in batch.items():
        columns |= column(name, value, class_names, top)
    return columns


def column(name: str, value: Any, class_names: Sequence[str], top: int) -> Columns:
    """One column, or several for a tensor ``[B, C]``."""
    if isinstance(value, list | tuple):
        return {name: list(value)}
    # Not by its type: torch is imported only where a model is.
    num_dimensions = getattr(value, "ndim", None)
    if num_dimensions == 1:
        return {name: numbers_of(value)}
    if num_dimensions != 2:
        raise no_column(name, value)
    if class_names and value.shape[1] == len(class_names):
        return name_classes(value, class_names, top, name)
    if value.shape[1] == 1:
        return {name: numbers_of(value.flatten())}
    columns: Columns = {}
    for number, numbers in enumerate(value.T):
        columns[f"{name}_{number}"] = numbers_of(numbers)
    return columns


def no_column(name: str, value: Any) -> ConfigError:
    """The error for something that is no column of a table."""
    what = type(value).__name__
    if hasattr(value, "shape"):
        what = f"a tensor {list(value.shape)}"
    return ConfigError(
        f"predict_step returns {name} as {what}: a table takes tensors [B] or [B, C], or a "
        "dictionary of them; --output FILE.pt keeps any shape, and a predict_step that writes "
        "files itself returns nothing"
    )


def name_classes(scores: "Tensor", class_names: Sequence[str], top: int, name: str) -> Columns:
    """The ``top`` classes with the highest scores of each row ``[B, C]``, the highest first."""
    # Stable, so that of equal scores the class with the lower number comes first on every device.
    values, ids = scores.sort(dim=1, descending=True, stable=True)
    columns: Columns = {}
    for place in range(top):
        number = f"_{place + 1}" if place else ""
        columns[f"class{number}"] = [class_names[id] for id in ids[:, place].tolist()]
        columns[f"{name}{number}"] = numbers_of(values[:, place])
    return columns


def numbers_of(column: "Tensor") -> list[Any]:
    """The numbers of a tensor ``[B]``."""
    values = column.detach().cpu().tolist()
    if not column.is_floating_point():
        return list(values)
    # As Python floats they would show figures that 32 bits do not have: 0.10000000149011612.
    return [float(f"{value:.7g}") for value in values]


def save(batches: Sequence[Any], output: Path) -> None:
    """Write what ``predict_step`` has returned, of any shape."""
    import torch  # imported with the model, and not for invalid arguments

    torch.save(batches, output)


def rows_of(columns: Columns) -> Iterator[tuple[Any, ...]]:
    """A row for each sample."""
    return zip(*columns.values(), strict=True)


def print_json(columns: Columns, output: None) -> None:
    """Print an object for each sample."""
    objects = [dict(zip(columns, row, strict=True)) for row in rows_of(columns)]
    print(json.dumps(objects, indent=2))


def print_csv(columns: Columns, output: None) -> None:
    """Print a line for each sample."""
    write_lines(columns, sys.stdout)


def write_csv(columns: Columns, output: Path) -> None:
    """Write a line for each sample."""
    with output.open("w", encoding="utf-8", newline="") as file:
        write_lines(columns, file)


def write_lines(columns: Columns, file: TextIO) -> None:
    """Write columns as CSV."""
    table = csv.writer(file, lineterminator="\n")
    table.writerow(columns)
    table.writerows(rows_of(columns))


def write_parquet(columns: Columns, output: Path) -> None:
    """Write columns as Parquet."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"--output {output}: needs pyarrow; `pip install pyarrow`") from error
    parquet.write_table(pyarrow.table(columns), output)


WRITERS: dict[str, Callable[[Columns, Any], None]] = {
    "csv": print_csv,
    "json": print_json,
    ".csv": write_csv,
    ".parquet": write_parquet,
}
"""By the value of --format on stdout, or the suffix of a file."""
