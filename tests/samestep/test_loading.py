"""Runs read back from their directories."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from samestep import ConfigError, RunError, load_run
from samestep.run.checkpoint import AtomicCheckpointIO
from tests.conftest import run


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the shared run, to damage."""
    return shutil.copytree(digits_run, tmp_path / "digits")


@pytest.mark.parametrize("ckpt", ["best", "last"])
def test_a_run_is_loaded_from_its_directory_alone(digits_run: Path, ckpt: str) -> None:
    model, data = load_run(str(digits_run), ckpt)
    assert not model.training
    assert type(model.net).__name__ == "CNN"
    assert data.class_names == [str(digit) for digit in range(10)]
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_missing_checkpoint_is_named_with_those_that_exist(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "best.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"ckpt=best: .* holds last"):
        load_run(run_dir)


def test_a_damaged_checkpoint_is_refused(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "best.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="cannot be used"):
        load_run(run_dir)


def change_config(run_dir: Path, **values: object) -> None:
    """Write other values into the configuration of a run, as an attacker would."""
    config = OmegaConf.load(run_dir / "config.yaml")
    for key, value in values.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True, merge=False)
    OmegaConf.save(config, run_dir / "config.yaml")


def test_a_run_that_is_trusted_may_name_anything(run_dir: Path) -> None:
    change_config(run_dir, data={"_target_": "types.SimpleNamespace", "download": True})
    with pytest.raises(ConfigError, match=r"data\._target_=types\.SimpleNamespace: .* --trust"):
        load_run(run_dir)
    assert load_run(run_dir, trust=True)[1].download


def test_a_class_that_is_gone_is_named(run_dir: Path) -> None:
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("model.Classifier", "model.Gone"))
    with pytest.raises(ConfigError, match=r"project\.model\.Gone"):
        load_run(run_dir)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_run(tmp_path)


@pytest.mark.parametrize("config", ["a: 1", "model: 3\ndata: null", "model: {_target_: x}"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged: .* must be a group of keys"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {},
        torch.zeros(3),
        {"state_dict": None},
        {"state_dict": {}},
        {"state_dict": {"net.layers.1.weight": torch.zeros(2)}},
    ],
    ids=["empty", "tensor", "none", "no weights", "other shapes"],
)
def test_a_checkpoint_of_something_else_is_one_message(run_dir: Path, content: object) -> None:
    path = run_dir / "checkpoints" / "best.ckpt"
    torch.save(content, path)
    if isinstance(content, dict):
        AtomicCheckpointIO().save_checkpoint(content, path)
    with pytest.raises(RunError) as caught:
        load_run(run_dir)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)


@pytest.mark.program
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_the_run_of_somebody_else_calls_nothing_that_writes(
    run_dir: Path, command: str, tmp_path: Path
) -> None:
    target = tmp_path / "written"
    call = {"_target_": "samestep.run.files.write_text", "path": str(target), "text": "evil"}
    change_config(run_dir, model__net__extra=call, data=call)
    image = ["x.png"] if command == "predict" else []
    result = run("-m", "samestep", command, str(run_dir), *image)
    assert result.returncode == 2
    assert result.stderr.startswith("error: data._target_=samestep.run.files.write_text: ")
    assert result.stderr.count("\n") == 1
    assert not target.exists()


def test_nothing_is_called_before_the_checkpoint_is_proven(run_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "written"
    change_config(run_dir, data={"_target_": "builtins.open", "file": str(target), "mode": "w"})
    (run_dir / "checkpoints" / "best.ckpt").write_bytes(b"anything")
    with pytest.raises(RunError, match="cannot be used"):
        load_run(run_dir, trust=True)
    assert not target.exists()


@pytest.mark.program
def test_the_run_of_somebody_else_downloads_nothing(run_dir: Path, tmp_path: Path) -> None:
    # A run could name a folder and the files that are written there.
    change_config(
        run_dir, data__dataset={"_target_": "torchvision.datasets.MNIST", "_partial_": True},
        data__root=str(tmp_path / "home"), data__download=True,
    )  # fmt: skip
    result = run("-m", "samestep", "evaluate", str(run_dir), "--accelerator", "cpu")
    assert result.returncode == 1
    assert "Dataset not found" in result.stderr
    assert "data.download=false" in result.stderr
    assert not (tmp_path / "home").exists()
    result = run("-m", "samestep", "evaluate", str(run_dir), "--download")
    assert (result.returncode, result.stderr[:43]) == (
        2,
        "error: --download: needs --data-root DIR, t",
    )


def test_a_saved_text_is_never_a_reference(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "0123456789abcdef")
    names = ["${oc.env:MY_SECRET} ${nope}"]
    change_config(run_dir, data__mirror=names[0])
    _, data = load_run(run_dir)
    assert data.mirror == names[0]


def test_a_saved_text_is_never_a_call(run_dir: Path) -> None:
    text = "${oc.create:{_target_: os.mkdir, path: made}}"
    change_config(run_dir, data__mirror=text)
    _, data = load_run(run_dir)
    assert data.mirror == text


@pytest.mark.program
def test_an_export_does_not_follow_a_link(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (run_dir / "export").symlink_to(tmp_path / "mine")
    result = run("-m", "samestep", "export", str(run_dir))
    assert result.returncode == 1
    assert "export: is a link" in result.stderr
    assert not list((tmp_path / "mine").iterdir())
