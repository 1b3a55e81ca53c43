"""The private names of other libraries that no file alone needs, with the version and the reason.

Others stand with the file that needs them. Each has a canary test in library/tests, which fails
when the other library has changed; pyproject.toml bounds the versions from above.
"""

from collections.abc import Iterable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from samestep.ranks import environment

if TYPE_CHECKING:
    import lightning as L  # takes seconds to import


Kind = TypeVar("Kind")


def callbacks_of(trainer: "L.Trainer", kind: type[Kind]) -> list[Kind]:
    """The callbacks of one kind; the types of Lightning 2.6 know no callbacks of a Trainer."""
    return of_kind(trainer.callbacks, kind)  # type: ignore[attr-defined]


def of_kind(things: Iterable[object], kind: type[Kind]) -> list[Kind]:
    """Those of several objects that are of one class, or of a subclass of it."""
    return [thing for thing in things if isinstance(thing, kind)]


def apply(trainer: "L.Trainer") -> None:
    """Change what Lightning has no switch for, in every run."""
    leave_signals_to_us(trainer)
    search_gpus_once()
    name_arguments_of_loaders()
    unscale_before_clipping(trainer)


def leave_signals_to_us(trainer: "L.Trainer") -> None:
    """Keep Lightning 2.6 from handling SIGTERM.

    Its handler talks to the other ranks in the middle of a step, and hangs there. There is no
    public switch. Our way is samestep.ranks.stopping; ``EpochLoop`` leaves out the broadcast in
    each step. Upstream: Lightning-AI/pytorch-lightning issues 20806 and 21487.
    """
    ours: Any = trainer
    ours._signal_connector.register_signal_handlers = lambda: None


def search_gpus_once() -> None:
    """Keep torch 2.15 from searching for GPUs before each step, where there are none.

    Adam and AdamW ask in each step whether there is a GPU. Lightning 2.6 sets a variable with which
    torch loads the library of the driver to answer, so that CUDA is not started before processes
    are forked. Without a GPU no CUDA can be started. An MNIST-format epoch takes 1.13 times as long
    without this (labs/bench/results.md). Upstream: pytorch/pytorch pull request 85951.
    """
    import torch

    if not torch.cuda.is_available():
        environment.unset_variables(["PYTORCH_NVML_BASED_CUDA_CHECK"])


def unscale_before_clipping(trainer: "L.Trainer") -> None:
    """Let mixed precision clip the gradients of a fused optimizer, with which Lightning 2.6 raises.

    With 16-mixed a fused optimizer of torch 2.15 divides its gradients by the scale within its
    step, which is too late to clip them, and says so by an attribute. Without it the scaler divides
    them before, as for any other optimizer. The step is still one kernel, but waits for the device.
    Lightning raises with bf16-mixed too, which has no scale.
    """
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.utilities.model_helpers import is_overridden

    if not isinstance(trainer.precision_plugin, MixedPrecision):
        return
    strategy: Any = trainer.strategy
    set_up = strategy.setup_optimizers

    def set_up_and_unscale(*args: Any) -> None:
        set_up(*args)
        module = strategy.lightning_module
        clips = trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", module)
        if clips:
            for optimizer in strategy.optimizers:
                optimizer._step_supports_amp_scaling = False

    strategy.setup_optimizers = set_up_and_unscale


@cache  # once in a process, which may have several runs
def name_arguments_of_loaders() -> None:
    """Let Lightning 2.6 make a ``DataLoader(dataset, 32, True)`` again.

    It does so to predict, and to split the data over several ranks. What was passed by position it
    passes a second time by name, and fails. Upstream: Lightning-AI/pytorch-lightning issue 17991.
    """
    from lightning.pytorch.utilities import data

    find = data._get_dataloader_init_args_and_kwargs

    @wraps(find)
    def find_by_name(loader: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        positional, named = find(loader, *args, **kwargs)
        # Lightning notes the names of what was passed by position, and does not use them here.
        names = getattr(loader, "__pl_saved_arg_names", ())
        if len(names) != len(positional):  # a subclass that takes *args
            return positional, named
        return (), dict(zip(names, positional, strict=True)) | named

    data._get_dataloader_init_args_and_kwargs = find_by_name  # type: ignore[assignment]
