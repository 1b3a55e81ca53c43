"""The classifier and its nets."""

import math

import lightning as L
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from samestep import ConfigError
from samestep.hydra import build
from samestep.hydra.compose import check

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def make(*words: str) -> L.LightningModule:
    """The model of a command line."""
    return build.build_model(check([*words]))


@pytest.mark.parametrize(
    "words",
    [
        ["model=cnn"],
        ["model=mlp", "data=mnist"],
        ["model=resnet18", "model.net.width=4", "data=cifar10"],
        ["model=cnn", "data=folder", "data.root=x", "data.num_classes=10"],
    ],
)
def test_every_net_takes_the_images_of_every_set(words: list[str]):
    model = make(*words)
    logits = model(torch.randint(256, (64, *model.example_input_array.shape[1:])).byte())
    assert logits.shape == (64, 10)
    loss = cross_entropy(logits, torch.arange(64) % 10)
    assert math.isclose(loss.item(), math.log(10), rel_tol=0.2), "an untrained net guesses"
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_bytes_and_numbers_from_0_to_1_are_the_same_image():
    model = make()
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    numbers = images / 255
    before = numbers.clone()
    assert torch.allclose(model(images), model(numbers), atol=1e-5)
    assert torch.equal(numbers, before)


def test_norms_and_biases_do_not_decay():
    model = make("model=resnet18", "model.net.width=4")
    ((optimizer,), _) = model.build_optimizer(total_steps=10)
    decayed, plain = optimizer.param_groups
    assert all(p.ndim > 1 for p in decayed["params"])
    assert all(p.ndim == 1 for p in plain["params"])
    assert (decayed["weight_decay"] > 0, plain["weight_decay"]) == (True, 0)
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert in_groups == {id(p) for p in model.net.parameters()}


def test_figures_are_those_of_the_whole_set():
    cfg = check(["data.eval_batch_size=50", "model.label_smoothing=0.1"])
    model, data = build.build_model(cfg), build.build_datamodule(cfg)
    trainer = L.Trainer(use_distributed_sampler=False, **QUIET)
    trainer.test(model, data, verbose=False)
    images, labels = data.test_set.tensors
    with torch.no_grad():
        logits = model(images)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    accuracy = (logits.argmax(1) == labels).float().mean().item()
    assert logged["test/accuracy"] == pytest.approx(accuracy)
    # Smoothing is for training only.
    assert logged["test/loss"] == pytest.approx(cross_entropy(logits, labels).item())


def test_it_trains_on_anybodys_data():
    """Batches of numbers and labels, without class names: torch's own DataLoader."""
    torch.manual_seed(0)
    model = make("data.num_classes=11", "model=mlp")
    loader = DataLoader(TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 11), 8)
    trainer = L.Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, loader, loader)
    trainer.test(model, loader, verbose=False)
    assert trainer.global_step == 5
    assert {"test/loss", "test/accuracy", "test/top5_accuracy"} <= {*trainer.callback_metrics}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.optimizer.lr=-1"], "Invalid learning rate: -1"),
        (["model.lr_scheduler.pct_start=2"], "pct_start"),
        (["model.net.channels=[1]"], r"expected 2, got 1"),
    ],
)
def test_wrong_arguments_are_an_error_before_the_data_are_read(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        make(*words)


def test_compiling_keeps_the_names_of_the_weights():
    assert {*make("model.compile=true").state_dict()} == {*make().state_dict()}
