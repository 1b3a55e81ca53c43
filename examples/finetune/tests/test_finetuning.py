"""Fine-tuning: what is frozen, at which rate it learns, and a kill on the way."""

import signal
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from examples.finetune.finetuning import FinetunedClassifier, Finetuning, load_weights
from examples.finetune.net import Pretrained
from samestep import ConfigError, load_run
from samestep.hydra import build
from samestep.hydra.compose import check
from tests.conftest import final_metrics, run

SMALL = ["data.image_size=32", "data.num_workers=0", "data.global_batch_size=8",
         "trainer.accelerator=cpu", "trainer.max_epochs=2", "report=false"]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides: 20 photographs of two classes, and weights that somebody has trained."""
    root = tmp_path_factory.mktemp("finetune")
    rng = np.random.default_rng(0)
    for part, label, number in product(("train", "test"), "ab", range(10)):
        path = root / f"photos/{part}/{label}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 80, (32, 32, 3)) + 60 * (label == "b")
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    torch.manual_seed(1)
    torch.save(torchvision.models.resnet18().state_dict(), root / "resnet18.pth")
    return [
        "experiment=finetune", f"data.root={root}/photos", "data.num_classes=2", *SMALL,
        f"callbacks.finetuning.weights={root}/resnet18.pth", "callbacks.finetuning.frozen_epochs=1",
    ]  # fmt: skip


def backbone(run_dir: Path, name: str) -> dict[str, torch.Tensor]:
    state = torch.load(run_dir / f"checkpoints/{name}.ckpt", weights_only=True)["state_dict"]
    start = "net.backbone."
    return {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}


@pytest.mark.program
def test_a_kill_after_the_backbone_is_unfrozen_changes_nothing(words: list[str], tmp_path: Path):
    """Two steps an epoch: the backbone is frozen for two steps, and learns for two.

    A kill before: the library's callbacks/test_continuing.py.
    """
    node = "+callbacks.recorder"
    command = [
        "train.py", *words, f"run_root={tmp_path}", f"{node}._target_=tests.recorder.Recorder",
        f"{node}.dirpath={tmp_path}/records", "callbacks.checkpoints.every_s=0.000001",
        "callbacks.checkpoints.every_n_epochs=1",
    ]  # fmt: skip
    done = run(*command, RUN_ID="whole")
    assert done.returncode == 0, done.stderr
    done = run(*command, RUN_ID="killed", KILL_AT="3")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run(*command, "callbacks.finetuning.weights=/gone.pth", RUN_ID="killed")
    assert done.returncode == 0, done.stderr
    assert final_metrics(tmp_path / "killed") == final_metrics(tmp_path / "whole")
    runs = [tmp_path / "whole", tmp_path / "killed"]
    whole, killed = (load_run(run_dir, "last")[0].state_dict() for run_dir in runs)
    assert all(torch.equal(killed[name], whole[name]) for name in whole)

    given = torch.load(words[-2].partition("=")[2], weights_only=True)
    frozen, free = (backbone(tmp_path / "whole", f"epoch-000{n}") for n in (1, 2))
    assert all(torch.equal(value, given[name]) for name, value in frozen.items())
    assert not any(torch.equal(free[name], given[name]) for name in ("conv1.weight", "bn1.weight"))
    assert not torch.equal(free["bn1.running_mean"], given["bn1.running_mean"])


def test_the_backbone_has_a_rate_of_its_own(words: list[str]):
    model = build.build_model(
        check([*words, "model.backbone_lr=0.0001", "model.optimizer.lr=0.01"])
    )
    (optimizer,), (config,) = model.build_optimizer(total_steps=20)
    schedule, highest = config["scheduler"], [0.0] * 4
    counts = [len(group["params"]) for group in optimizer.param_groups]
    assert counts == [1, 1, 21 - 1, 40]  # matrices and kernels, then norms and biases
    for _ in range(19):
        highest = [*map(max, highest, schedule.get_last_lr())]
        optimizer.step()
        schedule.step()
    assert highest == pytest.approx([0.01, 0.01, 0.0001, 0.0001], rel=0.01)
    decays = [group["weight_decay"] > 0 for group in optimizer.param_groups]
    assert decays == [True, False, True, False]


def test_weights_come_from_files_of_several_kinds(tmp_path: Path):
    theirs = {"conv.weight": torch.ones(2), "conv.bias": torch.ones(2), "fc.weight": torch.ones(3)}
    for number, (prefix, wrap) in enumerate(
        [("", False), ("module.", False), ("net.backbone.", True), ("net.", True)]
    ):
        path = tmp_path / f"{number}.pth"
        state = {prefix + name: value for name, value in theirs.items()}
        torch.save({"state_dict": state} if wrap else state, path)
        part = nn.Module()
        part.conv = nn.Module()
        part.conv.weight, part.conv.bias = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        load_weights(part, str(path))
        assert part.conv.weight.tolist() == part.conv.bias.tolist() == [1, 1]
    part.conv.other = nn.Parameter(torch.zeros(1))
    for wrong, said in (("0.pth", "lack conv.other; they do not fit"), ("9.pth", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            load_weights(part, str(tmp_path / wrong))


def test_values_that_would_train_something_else_are_rejected():
    with pytest.raises(ValueError, match="frozen_epochs=-1: must be at least 0"):
        Finetuning(None, frozen_epochs=-1)
    with pytest.raises(ValueError, match="backbone_lr=-1: must be above 0"):
        FinetunedClassifier(backbone_lr=-1)


def test_the_last_layer_is_replaced():
    net = Pretrained(
        backbone=torchvision.models.mobilenet_v3_small(), last_layer="classifier.3", num_classes=5
    )
    assert net.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"last_layer=fc: must be one of .*classifier\.3"):
        Pretrained(backbone=torchvision.models.mobilenet_v3_small(), last_layer="fc", num_classes=5)
