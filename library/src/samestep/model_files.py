"""The files of an exported model, each read back and compared with the original."""

import copy
import importlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_model, save_model
from torch import Tensor

from samestep.errors import ConfigError, RunError
from samestep.fit_checks import has_test
from samestep.hydra.build import build
from samestep.hydra.saved_run import group_of, read_saved_config
from samestep.model_card import write_card

NUM_SAMPLES = 64  # of the test, on which the files are checked
TOLERANCE = 1e-4  # of the largest output: how far an output may be from the original


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
    """Write ``<run_dir>/export`` once all files in it are proven right.

    Args:
        run_dir: where the model comes from.
        model: a LightningModule with an ``example_input_array``.
        data: its DataModule, or None. Its test samples are what the files are checked on.
        ckpt: name of the checkpoint of ``model``, for the model card.
        licence: of the weights, for the model card.
        onnx: write ``model.onnx`` too.

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
    # Other programs compute with 32 bits, whatever the run did.
    model = model.eval().float()
    inputs = real_inputs(model, data, example_of(model))
    class_names = list(getattr(data, "class_names", []))
    config: dict[str, Any] = {"model": group_of(read_saved_config(run_dir), "model")}
    if class_names:
        config["class_names"] = class_names

    expected = compute(model, inputs)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=run_dir) as name:
        folder = Path(name)
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        # safetensors gives the right to read to the owner only.
        shutil.copymode(folder / "config.yaml", folder / "model.safetensors")
        program = trace(model, inputs)
        torch.export.save(program, folder / "model.pt2")

        # Each file is read back, and must give the outputs of the original: a net that keeps what
        # it knows outside of parameters and buffers would be exported without it.
        rebuilt: Any = build(OmegaConf.load(folder / "config.yaml").model, "model")
        load_model(rebuilt, folder / "model.safetensors")
        outputs = {
            "model.safetensors": compute(rebuilt.eval().float(), inputs),
            "model.pt2": compute(torch.export.load(folder / "model.pt2").module(), inputs),
        }
        if onnx:
            outputs["model.onnx"] = compute_onnx(program, inputs, folder / "model.onnx")
        differences = compare(outputs, expected)
        card = write_card(
            run_dir,
            ckpt,
            class_names,
            num_weights=sum(parameter.numel() for parameter in model.parameters()),
            licence=licence,
            inputs=[describe(x) for x in inputs],
        )
        (folder / "README.md").write_text(card, "utf-8")
        # All files are proven now: until here the export of an earlier run is untouched.
        target.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.replace(target / path.name)
    return differences


def compare(outputs: dict[str, Tensor], expected: Tensor) -> dict[str, float]:
    """The largest difference of each file's outputs; an ExportError if one is too large."""
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    differences = {}
    for file, output in outputs.items():
        difference = float((output - expected).abs().max())
        # "not <=" instead of ">": nan must fail too.
        if not difference <= allowed:
            raise ExportError(
                f"{file}: outputs differ from the original's by {difference:.1e}; nothing was "
                "written. A net must keep what it knows in parameters and buffers, and compute "
                "the same when it is traced"
            )
        differences[file] = difference
    return differences


def describe(x: Tensor) -> str:
    """Type and shape of an input, such as ``uint8 [B, 1, 8, 8]``."""
    shape = ", ".join(["B", *map(str, x.shape[1:])])
    return f"{str(x.dtype).removeprefix('torch.')} [{shape}]"


def example_of(model: Any) -> list[Tensor]:
    """The inputs of ``model.example_input_array``, at least two of each, on the CPU."""
    example = model.example_input_array
    inputs = (example,) if isinstance(example, Tensor) else example
    is_batch = isinstance(inputs, tuple)
    if not is_batch or not all(isinstance(x, Tensor) and x.ndim for x in inputs):
        raise ConfigError(
            f"{type(model).__name__}.example_input_array: must be a batch as forward takes it, a "
            "tensor or a tuple of tensors; set it in __init__, as in "
            "self.example_input_array = torch.randn(2, 8)"
        )
    return [x if len(x) > 1 else torch.cat([x, x]) for x in inputs]


def real_inputs(model: Any, data: Any, example: list[Tensor]) -> list[Tensor]:
    """Samples of the test, if its batches start with what ``forward`` takes; else ``example``.

    An example is often all zeros, for which a wrong net may compute the right outputs.
    """
    if not has_test(model, data):
        return example
    try:
        if data is not None:
            data.prepare_data()
            data.setup("test")
        batch = next(iter((model if data is None else data).test_dataloader()))
    except (ConfigError, RunError) as error:
        # The model may be exported far from its data.
        note = "note: the files are checked on example_input_array only, because the data cannot be"
        print(f"{note} read: {error}", file=sys.stderr)
        return example
    parts = batch if isinstance(batch, list | tuple) else [batch]
    samples = [x[:NUM_SAMPLES].cpu() for x in parts[: len(example)] if isinstance(x, Tensor)]
    if len(samples) == len(example) and all(map(is_like, samples, example)):
        return samples
    return example


def is_like(samples: Tensor, example: Tensor) -> bool:
    """Whether these are several samples of the type and shape of the example."""
    is_same = samples.dtype == example.dtype and samples.shape[1:] == example.shape[1:]
    return is_same and len(samples) > 1


def compute(program: Any, inputs: Sequence[Tensor]) -> Tensor:
    """All outputs in one row, for all inputs in one batch and for the first one alone."""
    found = []
    with torch.inference_mode():
        for batch in (inputs, [x[:1] for x in inputs]):
            for output in tensors_of(program(*batch)):
                found.append(output.flatten())
    return torch.cat(found)


def tensors_of(outputs: Any) -> list[Tensor]:
    """The tensors in what a model returns: one, or several in a list or dictionary."""
    if isinstance(outputs, Tensor):
        return [outputs.float()]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    found = []
    for value in values:
        found += tensors_of(value)
    return found


def trace(model: Any, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """The program of a model, for batches of any size."""
    # torch.export keeps requires_grad, so trace a copy: the model itself stays trainable.
    model = copy.deepcopy(model).requires_grad_(False)
    # Without this, the program would take batches of the size of the example only.
    batch = torch.export.Dim("batch", min=1)
    shapes = ({0: batch},) * len(inputs)
    try:
        return torch.export.export(model, tuple(x[:2] for x in inputs), dynamic_shapes=shapes)
    except Exception as error:
        raise ExportError(f"torch.export cannot trace the model: {error}") from error


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
