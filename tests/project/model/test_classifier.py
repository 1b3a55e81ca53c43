import math

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from samestep.callbacks.exact import SeedSteps
from samestep.errors import ConfigError
from samestep.hydra import build
from tests.project.data.test_datamodule import QUIET


def test_an_untrained_loss_is_a_guess(compose):
    classifier = build.model(compose())
    loss = F.cross_entropy(classifier(torch.randn(256, 1, 8, 8)), torch.arange(256) % 10)
    assert math.isclose(loss.item(), math.log(10), rel_tol=0.1)


def test_only_matrices_and_kernels_are_decayed(compose):
    classifier = build.model(compose("model=resnet18", "model.net.width=4"))
    optimizer, _ = classifier.build_optimizer(total_steps=10)
    decayed, plain = optimizer.param_groups
    assert all(p.ndim > 1 for p in decayed["params"])
    assert decayed["weight_decay"] > 0
    assert all(p.ndim == 1 for p in plain["params"])
    assert plain["weight_decay"] == 0
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert in_groups == {id(p) for p in classifier.net.parameters()}


def test_figures_are_those_of_the_whole_set(compose):
    cfg = compose("data.eval_batch_size=50", "model.label_smoothing=0.1")
    classifier, data = build.model(cfg), build.datamodule(cfg)
    trainer = L.Trainer(**QUIET)
    trainer.test(classifier, data, verbose=False)
    source = data.test_set.source
    with torch.no_grad():
        logits = classifier(data.normalize(source.images))
    right = logits.argmax(1) == source.labels
    logged = trainer.callback_metrics
    assert logged["test/accuracy"].item() == pytest.approx(right.float().mean().item())
    assert logged["test/loss"].item() == pytest.approx(
        F.cross_entropy(logits, source.labels).item()
    ), "smoothing is for training only"
    for digit in range(10):
        expected = right[source.labels == digit].float().mean().item()
        assert logged[f"test/accuracy_{digit}"].item() == pytest.approx(expected)
    assert classifier.confusion.sum(1).tolist() == source.labels.bincount().tolist()


@pytest.mark.parametrize("num_classes", [9, 11])
def test_other_numbers_of_classes_than_the_data_have_are_rejected(compose, num_classes: int):
    cfg = compose(f"model.num_classes={num_classes}", "model.net.num_classes=10")
    trainer = L.Trainer(max_epochs=1, **QUIET)
    message = rf"model.num_classes={num_classes}: the data have data.num_classes=10; leave"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(build.model(cfg), build.datamodule(cfg))
    assert trainer.global_step == 0


@pytest.mark.parametrize("num_classes", [9, 11])
def test_a_net_of_other_outputs_is_rejected_before_the_first_step(compose, num_classes: int):
    cfg = compose(f"model.net.num_classes={num_classes}")
    trainer = L.Trainer(max_epochs=1, **QUIET)
    message = rf"model.net: CNN gives logits \[\d+, {num_classes}\], and must give \[\d+, 10\]"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(build.model(cfg), build.datamodule(cfg))
    assert trainer.global_step == 0


def test_top5_accuracy_is_logged_with_more_than_ten_classes(compose):
    cfg = compose("data.num_classes=11", "data.class_names=null", "trainer.max_epochs=1")
    trainer = L.Trainer(max_epochs=1, limit_train_batches=2, **QUIET)
    trainer.fit(build.model(cfg), build.datamodule(cfg))
    names = {"train/top5_accuracy", "val/top5_accuracy"}
    assert names < set(trainer.callback_metrics)
    assert trainer.callback_metrics["val/top5_accuracy"] > trainer.callback_metrics["val/accuracy"]


def test_dropout_is_a_function_of_seed_step_and_epoch(compose):
    def loss_of_epoch(extra_numbers: int) -> float:
        cfg = compose("model=mlp", "model.net.dropout=0.5")
        torch.manual_seed(0)
        classifier, data = build.model(cfg), build.datamodule(cfg)
        torch.rand(extra_numbers)  # somebody else draws from the global generator
        seed = SeedSteps(cfg.seed)
        trainer = L.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[seed], **QUIET)
        trainer.fit(classifier, data)
        return trainer.callback_metrics["train/loss"].item()

    assert loss_of_epoch(0) == loss_of_epoch(5)


def test_a_run_without_an_end_is_refused(compose):
    cfg = compose()
    trainer = L.Trainer(max_epochs=-1, **QUIET)
    with pytest.raises(ConfigError, match=r"trainer\.max_epochs or trainer\.max_steps"):
        trainer.fit(build.model(cfg), build.datamodule(cfg))


def test_compiling_keeps_the_names_of_the_weights(compose):
    names = set(build.model(compose()).state_dict())
    assert set(build.model(compose("model.compile=true")).state_dict()) == names
