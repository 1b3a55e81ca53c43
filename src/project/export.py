"""Write the net of a run in forms that other programs read, each checked against the original.

runs/<run_id>/export/
    model.safetensors  the weights of the net
    config.yaml        what rebuilds the net and prepares its images
    model.pt2          a torch.export program, from uint8 images [B, C, H, W], any B, to logits
"""

import copy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from project.build import build
from project.classifier import ImageClassifier
from project.data import ImageDataModule
from project.options import ScriptError
from project.run import saved

NUM_IMAGES = 64  # of the test set, on which the files are checked
TOLERANCE = 1e-4  # of the largest logit, by which a logit may differ


class FromBytes(nn.Module):
    """Normalization and net in one: uint8 images ``[B, C, H, W]`` to logits."""

    scale: Tensor
    shift: Tensor

    def __init__(self, net: nn.Module, data: ImageDataModule) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", data.scale)
        self.register_buffer("shift", data.shift)

    def forward(self, images: Tensor) -> Tensor:
        """As ``data.normalize``, then the net."""
        logits: Tensor = self.net(torch.addcmul(self.shift, images.float(), self.scale))
        return logits


def main(model: ImageClassifier, data: ImageDataModule, options: dict[str, Any]) -> int:
    """Write the files beside their place, read them back, and move them there if they are right.

    Raises:
        ScriptError: if the net cannot be traced, or a file gives other logits on test images.
    """
    run_dir = Path(options["run"])
    target = run_dir / "export"
    data.num_workers, data.eval_batch_size = 0, NUM_IMAGES
    data.prepare_data()
    data.setup("test")
    images = next(iter(data.test_dataloader())).images  # uint8 [B, C, H, W]
    logits = logits_of(lambda images: model(data.normalize(images)), images)
    lines = [f"Written to {target}; logits of {len(images)} test images differ at most by"]
    with tempfile.TemporaryDirectory(prefix=".export-", dir=run_dir) as name:
        folder = Path(name)
        write_weights(model.net, saved(run_dir).model.net, data, folder)
        write_program(model.net, data, folder)
        restored = {
            "model.safetensors": read_weights(data, folder),
            "model.pt2": torch.export.load(folder / "model.pt2").module(),
        }
        for file, function in restored.items():
            difference = float((logits_of(function, images) - logits).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(logits.abs().max())):  # nan fails too
                raise ScriptError(
                    f"{file}: logits differ from the original's by {difference:.1e}; nothing was "
                    "written. A net must keep what it knows in parameters and buffers, and compute "
                    "the same when it is traced"
                )
            lines.append(f"  {file:<17}  {difference:.1e}")
        target.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.replace(target / path.name)
    print("\n".join(lines))
    return 0


def write_weights(net: nn.Module, cfg: DictConfig, data: ImageDataModule, folder: Path) -> None:
    """Write ``model.safetensors``, and what to make of it as ``config.yaml``."""
    keys = ("num_channels", "image_size", "class_names", "mean", "std")
    config = {"net": cfg, **{key: getattr(data, key) for key in keys}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    save_model(net, str(folder / "model.safetensors"), metadata={"format": "pt"})
    shutil.copymode(folder / "config.yaml", folder / "model.safetensors")  # not for its owner alone


def read_weights(data: ImageDataModule, folder: Path) -> nn.Module:
    """The net that the config names, with the weights."""
    net: nn.Module = build(OmegaConf.load(folder / "config.yaml").net, "net")
    load_model(net, folder / "model.safetensors")
    return FromBytes(net, data).eval()


def write_program(net: nn.Module, data: ImageDataModule, folder: Path) -> None:
    """Write ``model.pt2``, for batches of any size."""
    net = copy.deepcopy(net).requires_grad_(False)  # the copy's weights, not the model's
    example = torch.zeros(2, data.num_channels, data.image_size, data.image_size).byte()
    shapes = {"images": {0: torch.export.Dim("batch", min=1)}}
    try:
        program = torch.export.export(FromBytes(net, data), (example,), dynamic_shapes=shapes)
    except Exception as error:
        raise ScriptError(f"torch.export cannot trace the net: {error}") from error
    torch.export.save(program, folder / "model.pt2")


def logits_of(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Of all images at once, and of the first one alone."""
    with torch.inference_mode():
        return torch.cat([function(images), function(images[:1])])
