"""What is exported, and nets that cannot be exported."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from project import load_run
from project.export import export_run

FILES = ["README.md", "config.yaml", "model.pt2", "model.safetensors"]


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the shared run, to write into."""
    return shutil.copytree(digits_run, tmp_path / "digits")


def test_the_program_takes_batches_of_any_size(run_dir: Path) -> None:
    model, data = load_run(run_dir, "last")
    model.net.compile(backend="eager")  # as model.compile=true does
    differences = export_run(run_dir, model, data)
    assert list(differences) == ["model.safetensors", "model.pt2"]
    program = torch.export.load(run_dir / "export" / "model.pt2").module()
    for size in (1, 3, 64, 100):
        images = torch.randint(256, (size, 1, 8, 8), dtype=torch.uint8)
        logits = program(images)
        assert not logits.requires_grad
        torch.testing.assert_close(logits, model(data.normalize(images)).detach())


def test_the_config_says_what_the_images_and_the_logits_are(run_dir: Path) -> None:
    export_run(run_dir, *load_run(run_dir))
    config = OmegaConf.load(run_dir / "export" / "config.yaml")
    run_cfg = OmegaConf.load(run_dir / "config.yaml")
    assert config.net == run_cfg.model.net
    for key in ("num_channels", "image_size", "class_names", "mean", "std"):
        assert config[key] == run_cfg.data[key]
    modes = {(run_dir / "export" / name).stat().st_mode for name in FILES}
    assert len(modes) == 1  # who may read one may read all
