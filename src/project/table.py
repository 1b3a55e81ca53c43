"""Predictions of any model as a table: what its ``predict_step`` returns for each sample."""

import csv
import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ConfigError
from samestep.hydra import saved_run

Columns = dict[str, list[Any]]


def predict(
    model: Any, data: Any, run_dir: Path, files: Sequence[str], output: Path | None, device: str
) -> None:
    """Predict, and write what the model returns.

    The data get ``files`` as their attribute ``predict_files``. ``output`` is ``.csv``,
    ``.parquet`` or ``.pt``; None prints CSV. ``device`` is auto, cpu or gpu.

    Raises:
        ConfigError: if the data take no files, or there is nothing to predict, or no table.
    """
    if files:
        if not hasattr(data, "predict_files"):
            raise ConfigError(
                f"{files[0]}: {type(data).__name__} takes no files; give it an attribute "
                "predict_files, which its predict_dataloader reads"
            )
        data.predict_files = list(files)
    batches = saved_run.predict(model, data, run_dir, device)
    if all(batch is None for batch in batches):  # the step has written what it wanted
        print(f"{type(model).__name__}.predict_step returns nothing to write", file=sys.stderr)
    elif output and output.suffix == ".pt":
        torch.save(batches, output)
    else:
        write(batches, output)


def write(batches: Sequence[Any], output: Path | None) -> None:
    """Write a row for each sample."""
    columns: Columns = {}
    for batch in batches:
        for name, values in columns_of(batch).items():
            columns.setdefault(name, []).extend(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) > 1:
        raise ConfigError(f"predict_step returns columns of different lengths: {lengths}")
    if output and output.suffix == ".parquet":
        try:
            pyarrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(f"--output {output}: needs pyarrow; `pip install pyarrow`") from error
        parquet.write_table(pyarrow.table(columns), output)
        return
    opened = output.open("w", encoding="utf-8", newline="") if output else nullcontext(sys.stdout)
    with opened as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))


def columns_of(batch: Any, name: str = "prediction") -> Columns:
    """The columns in what ``predict_step`` returns: a tensor, or a dictionary of columns."""
    if isinstance(batch, dict):
        return {k: v for key, value in batch.items() for k, v in columns_of(value, key).items()}
    if isinstance(batch, list | tuple) and name != "prediction":
        return {name: list(batch)}
    if isinstance(batch, Tensor) and batch.ndim in (1, 2):
        if batch.ndim == 1 or batch.shape[1] == 1:
            return {name: numbers_of(batch.flatten())}
        return {f"{name}_{n}": numbers_of(column) for n, column in enumerate(batch.T)}
    what = f"a tensor {list(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
    raise ConfigError(
        f"predict_step returns {name} as {what}: a table takes tensors [B] or [B, C], or a "
        "dictionary of them; --output FILE.pt keeps any shape, and a predict_step that writes "
        "files itself returns nothing"
    )


def numbers_of(column: Tensor) -> list[Any]:
    """Numbers of a tensor, those of 32 bits with the seven digits that they hold."""
    values = column.detach().cpu().tolist()
    return [float(f"{v:.7g}") if isinstance(v, float) else v for v in values]
