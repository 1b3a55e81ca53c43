import inspect
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call as trainer_call

from samestep import build
from samestep.errors import ConfigError
from samestep.ranks import lightning_patches
from samestep.run.history import History


def test_a_step_does_only_what_is_asked_for(compose: Callable[..., object]):
    cfg = compose()
    build.trainer(cfg, History(cfg.run_dir))
    assert trainer_call._call_strategy_hook.__module__ == lightning_patches.__name__


def test_a_second_progress_bar_is_refused(compose: Callable[..., object]):
    cfg = compose("+callbacks.rich._target_=lightning.pytorch.callbacks.RichProgressBar")
    with pytest.raises(ConfigError, match="leave it out; callbacks"):
        build.trainer(cfg, History(cfg.run_dir))


def test_parameters_without_a_gradient_are_one_message():
    text = "parameters that were not used in producing the loss returned"
    assert text in inspect.getsource(DDPStrategy)
    with pytest.raises(ConfigError, match="ddp_find_unused_parameters_true"), build.refusals("x"):
        raise RuntimeError(f"It looks like your LightningModule has {text} by training_step.")


def test_a_model_of_64_bits_has_them_before_a_checkpoint_is_loaded(compose):
    """Lightning converts it later, and the weights of a checkpoint would be rounded."""
    model = build.model(compose("trainer.precision=64-true", "model=mlp"))
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_names_of_arguments_may_be_numbers(compose):
    """As in Lightning's GradientAccumulationScheduler(scheduling={1: 3})."""
    node = "+callbacks.slower"
    target = f"{node}._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler"
    cfg = compose(target, f"{node}.scheduling={{1:3}}")
    trainer = build.trainer(cfg, History(cfg.run_dir))
    (slower,) = (c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler))
    assert slower.scheduling == {0: 1, 1: 3}
