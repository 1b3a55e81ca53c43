"""Write the model of a run in forms that other programs read, each checked against the original.

Images are one case: there a net is exported behind what normalizes their bytes. Of every other
model it is ``forward``, for batches like its ``example_input_array``.
"""

import copy
import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from project.card import write_card
from samestep.errors import ConfigError, RunError
from samestep.hydra.build import build
from samestep.hydra.saved_run import group_of, read_saved_config

NUM_SAMPLES = 64  # test images on which the files are checked
TOLERANCE = 1e-4  # of the largest output: how far an output may be from the original
IMAGE_KEYS = ("num_channels", "image_size", "class_names", "mean", "std")  # in config.yaml

Inputs = tuple[Tensor, ...]


class ExportError(RunError):
    """The model cannot be exported; nothing was written."""


def export_run(
    run_dir: Path,
    model: Any,
    data: Any,
    ckpt: str = "best",
    licence: str | None = None,
    *,
    onnx: bool = False,
) -> dict[str, float]:
    """Write ``<run_dir>/export`` once all files in it are proven right on real inputs.

    ``README.md`` in it is the model card, for which ``ckpt`` names the checkpoint of ``model``, and
    ``licence`` is that of the weights. ``onnx`` writes ``model.onnx`` too.

    Returns:
        For each file the largest difference between its outputs and the original ones.

    Raises:
        ConfigError: if the model has no ``example_input_array``, or a package is missing.
        ExportError: if the model cannot be traced, or a file gives other outputs.
    """
    target = run_dir / "export"
    if target.is_symlink():  # it may have come with the run, and lead anywhere
        raise ExportError(f"{target}: is a link; remove it, and nothing was written")
    if onnx:
        check_onnx()
    model.float()  # other programs give numbers of 32 bits
    cfg = read_saved_config(run_dir)
    if hasattr(data, "export_inputs"):
        before, *inputs = data.export_inputs(NUM_SAMPLES)
        net, key, node = model.net, "net", cfg.model.net
        config = {key: node, **{name: getattr(data, name) for name in IMAGE_KEYS}}
    else:
        before, inputs = None, list(example_of(model))
        net, key, node = model, "model", group_of(cfg, "model")
        config = {key: node}

    def whole(net: nn.Module) -> nn.Module:
        return (net if before is None else nn.Sequential(before, net)).eval()

    expected = compute(whole(net), inputs)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=run_dir) as name:
        folder = Path(name)
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        save_model(net, str(folder / "model.safetensors"), metadata={"format": "pt"})
        # safetensors gives the right to read to the owner only.
        shutil.copymode(folder / "config.yaml", folder / "model.safetensors")
        program = trace(whole(net), inputs)
        torch.export.save(program, folder / "model.pt2")

        # Each file is read back, and must give the outputs of the original.
        again: nn.Module = build(getattr(OmegaConf.load(folder / "config.yaml"), key), key)
        load_model(again, folder / "model.safetensors")
        found = {
            "model.safetensors": compute(whole(again), inputs),
            "model.pt2": compute(torch.export.load(folder / "model.pt2").module(), inputs),
        }
        if onnx:
            found["model.onnx"] = compute_onnx(program, inputs, folder / "model.onnx")
        differences = {f: float((out - expected).abs().max()) for f, out in found.items()}
        for file, difference in differences.items():
            # "not <=" instead of ">": nan must fail too.
            if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise ExportError(
                    f"{file}: outputs differ from the original's by {difference:.1e}; nothing was "
                    "written. A net must keep what it knows in parameters and buffers, and compute "
                    "the same when it is traced"
                )
        classes = list(getattr(data, "class_names", []))
        weights = sum(parameter.numel() for parameter in net.parameters())
        shapes = [
            f"{str(x.dtype)[6:]} [{', '.join(map(str, ['B', *x.shape[1:]]))}]" for x in inputs
        ]
        card = write_card(run_dir, ckpt, classes, weights, licence, shapes)
        (folder / "README.md").write_text(card, "utf-8")
        target.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.replace(target / path.name)
    return differences


def example_of(model: Any) -> Inputs:
    """The inputs of ``model.example_input_array``, at least two of each, on the CPU."""
    example = model.example_input_array
    inputs = (example,) if isinstance(example, Tensor) else example
    if not isinstance(inputs, tuple) or not all(isinstance(x, Tensor) and x.ndim for x in inputs):
        raise ConfigError(
            f"{type(model).__name__}.example_input_array: must be a batch as forward takes it, a "
            "tensor or a tuple of tensors; set it in __init__, as in "
            "self.example_input_array = torch.randn(2, 8)"
        )
    return tuple(x if len(x) > 1 else torch.cat([x, x]) for x in inputs)


def compute(program: Any, inputs: Sequence[Tensor]) -> Tensor:
    """All outputs in one row, for all inputs in one batch and for the first one alone."""
    with torch.inference_mode():
        batches = inputs, [x[:1] for x in inputs]
        return torch.cat([x.flatten() for batch in batches for x in tensors_of(program(*batch))])


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors in what a model returns: one, or several in a list or dictionary."""
    if isinstance(outputs, Tensor):
        return [outputs.float()]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values for tensor in tensors_of(value)]


def trace(net: nn.Module, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """The program of a net, for batches of any size."""
    # torch.export keeps requires_grad, so trace a copy: the model itself stays trainable.
    net = copy.deepcopy(net).requires_grad_(False)
    batch = torch.export.Dim("batch", min=1)
    shapes = tuple({0: batch} for _ in inputs)
    try:
        return torch.export.export(net, tuple(x[:2] for x in inputs), dynamic_shapes=shapes)
    except Exception as error:
        raise ExportError(f"torch.export cannot trace the net: {error}") from error


def check_onnx() -> None:
    """Raise a ConfigError if a package is missing that writes or runs ONNX."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"--onnx: needs the package {name}, of the extra onnx; "
                "`pip install onnx onnxruntime onnxscript`"
            ) from error


def compute_onnx(
    program: torch.export.ExportedProgram, inputs: Sequence[Tensor], path: Path
) -> Tensor:
    """Write the program as ONNX, and compute as ``compute`` does, with another library."""
    runtime: Any = importlib.import_module("onnxruntime")
    try:
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=False, verbose=False)
    except Exception as error:
        raise ExportError(f"model.onnx: torch.onnx cannot write it: {error}") from error
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(*batch: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy() for name, x in zip(names, batch, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, arrays)]

    return compute(run, inputs)
