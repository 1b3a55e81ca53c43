from typing import Any

import lightning as L
import torch
from torch import nn

from samestep import loops
from samestep.callbacks.rng import SeedSteps
from samestep.hydra import build
from tests.project.data.test_datamodule import QUIET


def test_top5_accuracy_is_logged_with_more_than_ten_classes(compose):
    cfg = compose("data.num_classes=11", "data.class_names=null", "trainer.max_epochs=1")
    trainer = L.Trainer(max_epochs=1, limit_train_batches=2, **QUIET)
    trainer.fit(build.build_model(cfg), build.build_datamodule(cfg))
    names = {"train/top5_accuracy", "val/top5_accuracy"}
    assert names < set(trainer.callback_metrics)
    assert trainer.callback_metrics["val/top5_accuracy"] > trainer.callback_metrics["val/accuracy"]


def test_dropout_is_a_function_of_seed_step_and_epoch(compose):
    def loss_of_epoch(extra_numbers: int) -> float:
        cfg = compose("model=mlp", "model.net.dropout=0.5")
        torch.manual_seed(0)
        classifier, data = build.build_model(cfg), build.build_datamodule(cfg)
        torch.rand(extra_numbers)  # somebody else draws from the global generator
        seed = SeedSteps(cfg.seed)
        trainer = L.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[seed], **QUIET)
        loops.install(trainer)
        trainer.fit(classifier, data)
        return trainer.callback_metrics["train/loss"].item()

    assert loss_of_epoch(0) == loss_of_epoch(5)


def test_compiling_keeps_the_names_of_the_weights(compose):
    names = set(build.build_model(compose()).state_dict())
    assert set(build.build_model(compose("model.compile=true")).state_dict()) == names


def test_what_is_compiled_for_a_batch_depends_on_no_batch_before(compose, monkeypatch):
    """Otherwise a test after training runs other kernels than the same test on its own."""
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append([value for value in inputs if not isinstance(value, torch.Tensor)])
        return graph.forward

    compile = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda net, **how: compile(net, backend=backend, **how)
    )
    classifier = build.build_model(compose("model=mlp", "model.compile=true")).eval()
    for size in (4, 6, 5):
        with torch.inference_mode():
            classifier(classifier.example_input_array[:1].expand(size, -1, -1, -1))
    # A size that may vary would be an input of its own.
    assert seen == [[], [], []]
