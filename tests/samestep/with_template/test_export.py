"""What is exported, and nets that cannot be exported."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from project import load_run
from project.export import ExportError, export_run


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the shared run, to write into."""
    return shutil.copytree(digits_run, tmp_path / "digits")


class Forgetful(nn.Module):
    """Draws numbers that are in no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.randn(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.numbers


class Traced(nn.Module):
    """Computes something else when it is traced."""

    def forward(self, images: Tensor) -> Tensor:
        sums = images.flatten(1).cumsum(1)[:, :10]
        return sums + 1 if torch.compiler.is_exporting() else sums


class Nan(nn.Module):
    """Has diverged."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :10] * torch.nan


class Branching(nn.Module):
    """Looks at its images, which a trace cannot."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :10] if images.sum() > 0 else images.flatten(1)[:, 10:20]


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Forgetful, "model.safetensors: outputs differ"),
        (Traced, "model.pt2: outputs differ"),
        (Nan, "outputs differ from the original's by nan"),
        (Branching, "torch.export cannot trace the net"),
    ],
)
def test_a_net_that_would_come_out_different_leaves_what_was_there(
    run_dir: Path, net: type[nn.Module], message: str
) -> None:
    model, data = load_run(run_dir)
    model.net = net()
    cfg = OmegaConf.load(run_dir / "config.yaml")
    cfg.model.net = {"_target_": f"{__name__}.{net.__name__}"}
    OmegaConf.save(cfg, run_dir / "config.yaml")
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(ExportError, match=re.escape(message)):
        export_run(run_dir, model, data)
    assert sorted(run_dir.rglob("*")) == before
