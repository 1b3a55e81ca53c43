"""The callback that records what a program of ``samestep verify`` does, and harms it.

Each rank appends one line of JSON per batch, validation, test and end to ``rank-<rank>.jsonl``.
"""

import base64
import dataclasses
import json
import os
import signal
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from samestep.data.loaders import find_loaders
from samestep.data.sampler import ExactLoader
from samestep.data.torch_loaders import split_of
from samestep.errors import ConfigError
from samestep.ranks import virtual
from samestep.verify.plan import FIRST_STEP, Plan, done_file, file_of

MAX_VALUES = 64  # of one tensor
MAX_VALUES_OF_STEP = 20_000  # of all tensors together: a line of JSON stays below a megabyte
PADDING = (0, -100)  # at the end of a row: it depends on which samples a rank has in its slice


class Recorder(L.Callback):
    """Records each batch, and what it has done to weights, optimizers and buffers.

    Args:
        plan: of this program.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(plan.records)
        self._line: dict[str, Any] = {}  # of the batch that is trained on
        self._has_begun = False
        self._metrics_before: dict[str, Tensor] = {}  # a validation

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nothing: what this callback has seen is of this process."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise a ConfigError if the command has its own idea of how many ranks there are."""
        if trainer.world_size != self.plan.devices:
            raise ConfigError(
                f"samestep verify starts the ranks itself, and its command has started "
                f"{trainer.world_size}; leave out torchrun, srun and `samestep run`"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record what kind of run this is."""
        precision: Any = trainer.precision
        self._write(
            trainer,
            fit=str(Path(trainer.default_root_dir).absolute()),
            precision=str(precision),
            is_virtual=virtual.layout().is_virtual,
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the samples, and send the signal where it is due."""
        if not self._has_begun and trainer.is_global_zero:
            print(f"\n{FIRST_STEP}", flush=True)
        self._has_begun = True
        if virtual.current() != virtual.layout().own[0]:
            return  # rank zero has the first slice on any number of ranks
        rows = [digest for part in parts_of(batch) for digest in digests_of(part)]
        place = (trainer.current_epoch, batch_idx)
        self._line = {"place": place, "step": trainer.global_step, "rows": rows}
        if place == self.plan.place and trainer.global_rank == trainer.world_size - 1:
            self._send_signal()

    def _send_signal(self) -> None:
        done = done_file(self.folder)
        # Once in the life of a run: the program that continues comes here again after SIGKILL.
        if not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.Signals(self.plan.signum))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the loss, and all that an optimizer step has changed."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # With manual optimization a step may return none.
        if isinstance(loss, Tensor):
            self._line["loss"] = float(loss.detach().cpu().double().sum())
        # Between the batches of an accumulated step only gradients change.
        if trainer.global_step != self._line["step"]:
            self._line["state"] = state_of(trainer, pl_module)
        self._write(trainer, **self._line)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what training, and validations before, have logged."""
        self._metrics_before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record what callbacks see, such as the one that chooses the best checkpoint."""
        # It may run again in a program that continues.
        if trainer.sanity_checking:
            return
        new = set()
        for name, value in trainer.callback_metrics.items():
            # Another tensor, although it may have the same value.
            if value is not self._metrics_before.get(name):
                new.add(name)
        place = trainer.current_epoch, trainer.global_step
        is_split = are_all_split(trainer.val_dataloaders)
        metrics = metrics_of(trainer, new)
        self._write(trainer, stage="validation", at=place, metrics=metrics, is_split=is_split)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the metrics of the test."""
        metrics = metrics_of(trainer, set(trainer.callback_metrics))
        is_split = are_all_split(trainer.test_dataloaders)
        self._write(trainer, stage="test", at=(0, 0), metrics=metrics, is_split=is_split)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the final weights."""
        self._write(trainer, final=state_of(trainer, pl_module))

    def _write(self, trainer: L.Trainer, **facts: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Opened for each line: what was written is in the file when the process is killed.
        with file_of(self.folder, trainer.global_rank).open("a") as file:
            file.write(json.dumps(facts) + "\n")


def are_all_split(loaders: Any) -> bool:
    """Whether several ranks get slices of the batches that one rank would get."""
    found = [*find_loaders(loaders)] if loaders is not None else []
    return all(isinstance(one, ExactLoader) or split_of(one) is not None for one in found)


def metrics_of(trainer: L.Trainer, names: set[str]) -> dict[str, float]:
    """Some of the metrics that callbacks see."""
    return {name: float(trainer.callback_metrics[name]) for name in sorted(names)}


# -- Samples ---------------------------------------------------------------------------------------


def parts_of(batch: Any) -> Iterator[Any]:
    """All tensors, and lists of texts or of tensors for each sample, in a batch of any kind."""
    # An iterator, which a step reads itself, is none of these, and must not be read here.
    if isinstance(batch, Tensor):
        yield batch
    elif dataclasses.is_dataclass(batch):
        yield from parts_of([*vars(batch).values()])
    elif isinstance(batch, Mapping):
        yield from parts_of([*batch.values()])
    elif isinstance(batch, (list, tuple)):
        if batch and isinstance(batch[0], str):
            yield batch
            return
        for part in batch:
            yield from parts_of(part)
    elif isinstance(getattr(batch, "ptr", None), Tensor):
        # Graphs of PyG that were put together: each has as many rows as nodes.
        yield [*batch.x.tensor_split(batch.ptr[1:-1].cpu())]
    elif hasattr(batch, "x"):  # a graph of PyG
        yield from parts_of(batch.x)


def digests_of(part: Tensor | Sequence[str] | Sequence[Tensor]) -> list[int]:
    """A number for each sample in a part of a batch."""
    if not isinstance(part, Tensor):
        return [*map(digest_of_one, part)]
    # A number is no sample.
    if not part.ndim or part.numel() == 0:
        return []
    # Sparse tensors have no rows.
    if part.layout != torch.strided:
        part = part.to_dense()
    return [digest_of_row(row) for row in part.detach().cpu()]


def digest_of_one(sample: Tensor | str) -> int:
    """A number for a sample that is a text, or a tensor of its own."""
    if isinstance(sample, str):
        return zlib.crc32(sample.encode())
    return digest_of_row(sample.detach().cpu())


def digest_of_row(row: Tensor) -> int:
    """A number for one sample. Padding does not count: each rank pads to its own longest sample."""
    flat = row.flatten()
    is_padding = torch.zeros_like(flat, dtype=torch.bool)
    for value in PADDING:
        is_padding |= flat == value
    filled = (~is_padding).nonzero()
    end = int(filled[-1]) + 1 if len(filled) else 0
    return crc_of(flat[:end])


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor on the CPU."""
    flat = tensor.contiguous().flatten()
    # NumPy has no bfloat16, but every type has bytes.
    content: bytes = flat.view(torch.uint8).numpy().tobytes()
    return content


def crc_of(tensor: Tensor) -> int:
    """A checksum over all bytes of a tensor on the CPU."""
    return zlib.crc32(bytes_of(tensor)) if tensor.numel() else 0


# -- Weights, optimizers, buffers ------------------------------------------------------------------


def state_of(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, tuple[int, str]]:
    """Of each tensor and number that a step may change: a checksum, and some values."""
    found = dict(tensors_of(trainer, pl_module))
    num_values = min(MAX_VALUES, max(8, MAX_VALUES_OF_STEP // max(1, len(found))))
    return {name: summary_of(tensor, num_values) for name, tensor in found.items()}


def tensors_of(trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Each tensor and number that a step may change, and what it is called in the table."""
    names: dict[int, str] = {}
    for name, parameter in pl_module.named_parameters():
        names[id(parameter)] = name
        yield f"parameter {name}", parameter
    for number, optimizer in enumerate(trainer.optimizers):
        of = f"optimizer {number}" if len(trainer.optimizers) > 1 else "the optimizer"
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                # Such as lr and momentum, which schedules change.
                if key != "params":
                    yield from leaves_of(value, f"setting {key} of group {index} of {of}")
        for position, (owner, state) in enumerate(optimizer.state.items()):
            name = names.get(id(owner), f"parameter {position}")
            for key, value in state.items():
                yield from leaves_of(value, f"optimizer-state {key} of {name}")
    saved = pl_module.state_dict().keys()
    for name, buffer in pl_module.named_buffers():
        # Each rank may have another one, if no checkpoint holds it.
        kind = "buffer" if name in saved else "unsaved-buffer"
        yield f"{kind} {name}", buffer


def leaves_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors and numbers in a value, which may be a list or a dictionary of some."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from leaves_of(part, f"{name}[{index}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves_of(part, f"{name}.{key}")


def summary_of(tensor: Tensor, num_values: int) -> tuple[int, str]:
    """A checksum of all bytes, and as base64: sum, sum of absolute values, and some values."""
    # A part of a sharded model; all ranks ask for the same tensors in the same order.
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.flatten().double()
    # An element that is not among the values changes the sum.
    stride = max(1, -(-flat.numel() // num_values))
    values = torch.cat([flat.sum()[None], flat.abs().sum()[None], flat[::stride]])
    return crc_of(tensor), base64.b64encode(bytes_of(values)).decode()
