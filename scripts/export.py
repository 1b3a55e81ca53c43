"""Write the net of a run in forms that other programs read, each checked against the original.

runs/<run_id>/export/
    model.safetensors  the weights of the net
    config.yaml        what rebuilds the net and prepares its images
    model.pt2          a torch.export program, from uint8 images [B, C, H, W], any B, to logits

python scripts/export.py run=runs/digits-cnn-3f2a1b
"""

import copy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from options import ScriptError, run_script

from samestep.run.directory import saved

NUM_IMAGES = 64  # of the test set, on which the files are checked
TOLERANCE = 1e-4  # of the largest logit, by which a logit may differ


def main(model: Any, data: Any, options: dict[str, Any]) -> int:
    """Write the files beside their place, read them back, and move them there if they are right.

    Raises:
        ScriptError: if the net cannot be traced, or a file gives other logits on test images.
    """
    import torch  # once the words are checked

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


def write_weights(net: Any, cfg: Any, data: Any, folder: Path) -> None:
    """Write ``model.safetensors``, and what to make of it as ``config.yaml``."""
    from safetensors.torch import save_model

    keys = ("num_channels", "image_size", "class_names", "mean", "std")
    config = {"net": cfg, **{key: getattr(data, key) for key in keys}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    save_model(net, str(folder / "model.safetensors"), metadata={"format": "pt"})
    shutil.copymode(folder / "config.yaml", folder / "model.safetensors")  # not for its owner alone


def read_weights(data: Any, folder: Path) -> Any:
    """The net that the config names, with the weights."""
    from safetensors.torch import load_model
    from torch import nn

    from samestep.build import build

    net: Any = build(OmegaConf.load(folder / "config.yaml").net, "net")
    load_model(net, folder / "model.safetensors")
    return nn.Sequential(data.normalize, net).eval()


def write_program(net: Any, data: Any, folder: Path) -> None:
    """Write ``model.pt2``, for batches of any size."""
    import torch

    net = copy.deepcopy(net).requires_grad_(False)  # the copy's weights, not the model's
    example = torch.zeros(2, data.num_channels, data.image_size, data.image_size).byte()
    whole, shapes = torch.nn.Sequential(data.normalize, net), {0: torch.export.Dim("batch", min=1)}
    try:
        program = torch.export.export(whole, (example,), dynamic_shapes=(shapes,))
    except Exception as error:
        raise ScriptError(f"torch.export cannot trace the net: {error}") from error
    torch.export.save(program, folder / "model.pt2")


def logits_of(function: Callable[..., Any], images: Any) -> Any:
    """Of all images at once, and of the first one alone."""
    import torch

    with torch.inference_mode():
        return torch.cat([function(images), function(images[:1])])


if __name__ == "__main__":
    sys.exit(run_script("export", __doc__, main))
