"""Exported files, read as the documentation says."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from samestep import load_run
from samestep.export import licence_of_project
from samestep.model_files import ExportError, export_run
from tests.conftest import ROOT, run

FILES = ["README.md", "config.yaml", "model.pt2", "model.safetensors"]


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the shared run, to write into."""
    return shutil.copytree(digits_run, tmp_path / "digits")


@pytest.mark.program
def test_each_file_is_read_as_the_documentation_says(run_dir: Path) -> None:
    result = run("-m", "samestep", "export", str(run_dir))
    assert (result.returncode, result.stderr) == (0, "")
    files = sorted(path.name for path in (run_dir / "export").iterdir())
    assert files == ["README.md", "config.yaml", "model.pt2", "model.safetensors"]
    differences = dict(line.split() for line in result.stdout.splitlines()[1:])
    assert list(differences) == ["model.safetensors", "model.pt2"]
    assert all(float(difference) < 1e-4 for difference in differences.values())

    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.S)
    names: dict[str, Tensor] = {}
    found = []
    for snippet in (text for text in snippets if "probabilities" in text):
        exec(snippet.replace("runs/mine", str(run_dir)), names)
        found.append(names["probabilities"].detach())
    assert len(found) == 3
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


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
        torch.testing.assert_close(logits, model(images).detach())


def test_the_config_says_what_the_images_and_the_logits_are(run_dir: Path) -> None:
    export_run(run_dir, *load_run(run_dir))
    config = OmegaConf.load(run_dir / "export" / "config.yaml")
    run_cfg = OmegaConf.load(run_dir / "config.yaml")
    assert config.model == run_cfg.model
    assert list(config.class_names) == [*"0123456789"]
    modes = {(run_dir / "export" / name).stat().st_mode for name in FILES}
    assert len(modes) == 1  # who may read one may read all


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
        (Branching, "torch.export cannot trace the model"),
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


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ('[project]\nlicense = "MIT"\n', "MIT"),
        ('[project]\nname = "a"\n', None),
        ("[tool.ruff]\nline-length = 100\n", None),
        (None, None),
    ],
)
def test_the_licence_is_that_of_the_project_if_it_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, licence: str | None
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/train.yaml").touch()
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setenv("SAMESTEP_PROJECT", str(tmp_path))
    assert licence_of_project() == licence
