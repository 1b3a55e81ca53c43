import math

import lightning as L
import pytest
import torch
from torch.nn import functional as F

from samestep.errors import ConfigError
from samestep.hydra import build

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def test_an_untrained_loss_is_a_guess(compose):
    classifier = build.build_model(compose())
    loss = F.cross_entropy(classifier(torch.randint(256, (256, 1, 8, 8))), torch.arange(256) % 10)
    assert math.isclose(loss.item(), math.log(10), rel_tol=0.1)


def test_only_matrices_and_kernels_are_decayed(compose):
    classifier = build.build_model(compose("model=resnet18", "model.net.width=4"))
    optimizer, _ = classifier.build_optimizer(total_steps=10)
    decayed, plain = optimizer.param_groups
    assert all(p.ndim > 1 for p in decayed["params"])
    assert decayed["weight_decay"] > 0
    assert all(p.ndim == 1 for p in plain["params"])
    assert plain["weight_decay"] == 0
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert in_groups == {id(p) for p in classifier.net.parameters()}


def test_without_decay_all_parameters_are_one_group(compose):
    classifier = build.build_model(compose("model/optimizer=sgd", "model.optimizer.weight_decay=0"))
    optimizer, _ = classifier.build_optimizer(total_steps=10)
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in classifier.net.parameters()}


def test_figures_are_those_of_the_whole_set(compose):
    cfg = compose("data.eval_batch_size=50", "model.label_smoothing=0.1")
    classifier, data = build.build_model(cfg), build.build_datamodule(cfg)
    trainer = L.Trainer(**QUIET)
    trainer.test(classifier, data, verbose=False)
    source = data.test_set.source
    with torch.no_grad():
        logits = classifier(source.images)
    right = logits.argmax(1) == source.labels
    logged = trainer.callback_metrics
    assert logged["test/accuracy"].item() == pytest.approx(right.float().mean().item())
    assert logged["test/loss"].item() == pytest.approx(
        F.cross_entropy(logits, source.labels).item()
    ), "smoothing is for training only"
    for digit in range(10):
        expected = right[source.labels == digit].float().mean().item()
        assert logged[f"test/accuracy_{digit}"].item() == pytest.approx(expected)


@pytest.mark.parametrize("num_classes", [9, 11])
def test_a_net_of_other_outputs_is_rejected_before_the_first_step(compose, num_classes: int):
    cfg = compose(f"model.net.num_classes={num_classes}")
    trainer = L.Trainer(max_epochs=1, **QUIET)
    message = rf"model.net: CNN gives logits \[\d+, {num_classes}\], and must give \[\d+, 10\]"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(build.build_model(cfg), build.build_datamodule(cfg))
    assert trainer.global_step == 0
