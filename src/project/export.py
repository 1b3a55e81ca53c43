"""Write the net of a run in forms that other programs read, each checked against the original."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from project.card import write_card
from project.data.datamodule import ImageDataModule
from project.model.classifier import ImageClassifier
from samestep.errors import ConfigError, RunError
from samestep.hydra.build import build
from samestep.hydra.saved_run import group_of, read_saved_config

NUM_IMAGES = 64  # test images on which the files are checked
TOLERANCE = 1e-4  # of the largest logit: how far a logit may be from the original


class ExportError(RunError):
    """The net cannot be exported; nothing was written."""


def export_run(
    run_dir: Path,
    model: ImageClassifier,
    data: ImageDataModule,
    ckpt: str = "best",
    licence: str | None = None,
) -> dict[str, float]:
    """Write ``<run_dir>/export`` once all files in it are proven right on real test images.

    ``README.md`` in it is the model card.

    Args:
        run_dir: directory of the run.
        model: of the run, from the checkpoint ``ckpt``.
        data: of the run.
        ckpt: name of the checkpoint, for the card.
        licence: of the weights, for the card.

    Returns:
        For each file the largest difference between its logits and the original ones.

    Raises:
        ConfigError: if the run has not learned images.
        ExportError: if the net cannot be traced, or a file gives other logits.
    """
    if not isinstance(data, ImageDataModule):
        raise ConfigError(
            f"{run_dir}: only nets of images are exported, and this run has {type(data).__name__}; "
            "in Python, project.load_run gives its model"
        )
    target = run_dir / "export"
    if target.is_symlink():  # it may have come with the run, and lead anywhere
        raise ExportError(f"{target}: is a link; remove it, and nothing was written")
    model.float()  # other programs give images of 32 bits
    data.num_workers, data.eval_batch_size = 0, NUM_IMAGES
    data.prepare_data()
    data.setup("test")
    raw, _ = next(iter(data.test_dataloader()))
    expected = compute_logits(nn.Sequential(data.normalize, model), raw.images)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=run_dir) as name:
        folder = Path(name)
        cfg = group_of(read_saved_config(run_dir), "model")
        write_weights(model.net, cfg.net, data, folder)
        write_program(model.net, data, folder)

        # Each file is read back, and must give the logits of the original.
        net: nn.Module = build(OmegaConf.load(folder / "config.yaml").net, "net")
        load_model(net, folder / "model.safetensors")
        programs = {
            "model.safetensors": nn.Sequential(data.normalize, net).eval(),
            "model.pt2": torch.export.load(folder / "model.pt2").module(),
        }
        differences = {}
        for file, program in programs.items():
            logits = compute_logits(program, raw.images)
            differences[file] = float((logits - expected).abs().max())
            # "not <=" instead of ">": nan must fail too.
            if not differences[file] <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise ExportError(
                    f"{file}: logits differ from the original's by {differences[file]:.1e}; "
                    "nothing was written. A net must keep what it knows in parameters and buffers, "
                    "and compute the same when it is traced"
                )
        weights = sum(parameter.numel() for parameter in model.net.parameters())
        card = write_card(run_dir, ckpt, list(data.class_names), weights, licence)
        (folder / "README.md").write_text(card, "utf-8")
        target.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.replace(target / path.name)
    return differences


def compute_logits(program: nn.Module, images: Tensor) -> Tensor:
    """Logits of all images uint8 ``[B, C, H, W]`` in one batch, and of the first one alone."""
    with torch.inference_mode():
        return torch.cat([program(images), program(images[:1])])


def write_weights(net: nn.Module, cfg: Any, data: ImageDataModule, folder: Path) -> None:
    """Write ``model.safetensors``, and ``config.yaml`` from which the net can be built again."""
    keys = ("num_channels", "image_size", "class_names", "mean", "std")
    config = {"net": cfg, **{key: getattr(data, key) for key in keys}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    save_model(net, str(folder / "model.safetensors"), metadata={"format": "pt"})
    # safetensors gives the right to read to the owner only.
    shutil.copymode(folder / "config.yaml", folder / "model.safetensors")


def write_program(net: nn.Module, data: ImageDataModule, folder: Path) -> None:
    """Write ``model.pt2``, for batches of any size."""
    # torch.export keeps requires_grad, so trace a copy: the model itself stays trainable.
    net = copy.deepcopy(net).requires_grad_(False)
    example = torch.zeros(2, data.num_channels, data.image_size, data.image_size).byte()
    shapes = {0: torch.export.Dim("batch", min=1)}
    try:
        program = torch.export.export(
            nn.Sequential(data.normalize, net), (example,), dynamic_shapes=(shapes,)
        )
    except Exception as error:
        raise ExportError(f"torch.export cannot trace the net: {error}") from error
    torch.export.save(program, folder / "model.pt2")
