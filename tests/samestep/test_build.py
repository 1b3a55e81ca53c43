from collections.abc import Callable

import pytest

from samestep import build
from samestep.callbacks.progress import Progress
from samestep.ranks.lightning_patches import STEP_HOOKS
from samestep.run.history import History


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_a_step_does_only_what_is_asked_for(compose: Callable[..., object], profiler: str | None):
    cfg = compose(f"trainer.profiler={profiler or 'null'}")
    trainer = build.trainer(cfg, History(cfg.run_dir))
    assert isinstance(trainer.profiler, build.NoProfiler) is (profiler is None)
    (progress,) = (c for c in trainer.callbacks if isinstance(c, Progress))
    called = [hook for hook in STEP_HOOKS if getattr(progress, hook) is not None]
    assert called == ["on_train_batch_end"]
