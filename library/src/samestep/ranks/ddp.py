"""DDP of torch 2.15: what it lacks, and its private names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import collectives

MAX_NAMES = 5  # of parameters in a message


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of this name in the installed version."""
    return name in inspect.signature(function).parameters


def add_options(strategy: DDPStrategy, options: Mapping[str, Any]) -> None:
    """Give a DDPStrategy that exists further options; those that it has stay.

    Lightning keeps the options of DistributedDataParallel in the strategy until it wraps the model,
    and has no public way to read or add them.
    """
    strategy._ddp_kwargs = {**options, **strategy._ddp_kwargs}


def without_sync_in_forward() -> dict[str, bool]:
    """The option with which DDP sends no buffers from rank zero in each forward pass.

    Before torch 2.15 it is the one that also leaves out the first time; see ``sync_buffers``.
    """
    if takes(DistributedDataParallel.__init__, "forward_sync_buffers"):
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


def sync_buffers(strategy: Any) -> None:
    """Give all ranks the buffers of rank zero, where DDP before torch 2.15 does not."""
    option = without_sync_in_forward()
    # Newer versions send them themselves. So does one that the user has told to.
    if "broadcast_buffers" in option and option.items() <= strategy._ddp_kwargs.items():
        for buffer in strategy.model.buffers():
            collectives.broadcast(buffer)


def apply(trainer: L.Trainer) -> None:
    """Let the DDP of a Trainer follow its model, and find parameters that a step leaves out."""
    if isinstance(trainer.strategy, DDPStrategy):
        wrap_again_when_unfrozen(trainer.strategy)
        find_unused_parameters(trainer.strategy)


def wrap_again_when_unfrozen(strategy: Any) -> None:
    """Let DDP of torch 2.15 follow a model whose parameters are frozen or unfrozen while it trains.

    DDP sums the gradients of those parameters that needed one when it was made. Each rank would
    train a parameter that is unfrozen later by its own samples, and the ranks would end with
    different weights; for one that is frozen later, DDP waits in vain. Callbacks for fine-tuning
    do both. So the model is wrapped again before the step. Upstream:
    Lightning-AI/pytorch-lightning issue 20340.
    """
    configure, step = strategy.configure_ddp, strategy.training_step
    parameters: list[Any] = []
    registered: list[bool] = []  # which of them have their gradients summed

    def note_and_configure() -> None:
        parameters[:] = strategy.model.parameters()
        registered[:] = [parameter.requires_grad for parameter in parameters]
        configure()

    def sync_and_configure() -> None:
        sync_buffers(strategy)
        note_and_configure()

    def wrap_and_step(*args: Any, **named: Any) -> Any:
        # Asked in each step: a callback may freeze or unfreeze at any moment.
        if [parameter.requires_grad for parameter in parameters] != registered:
            strategy.model._remove_autograd_hooks()
            strategy.model = strategy.lightning_module
            options = strategy._ddp_kwargs
            # The ranks have equal weights already; their buffers differ within an epoch. torch 2.6
            # lacks this option, and leaves the buffers out by ``broadcast_buffers``.
            if takes(DistributedDataParallel.__init__, "init_sync"):
                strategy._ddp_kwargs = {**options, "init_sync": False}
            note_and_configure()
            strategy._ddp_kwargs = options
        return step(*args, **named)

    strategy.configure_ddp, strategy.training_step = sync_and_configure, wrap_and_step


def find_unused_parameters(strategy: Any) -> None:
    """Let a step that leaves out parameters end the run at once, with their names.

    DDP of torch 2.15 waits for the gradients of all parameters. It finds one that was left out when
    the next step begins. If only some ranks leave it out, the others wait until then for a sum of
    gradients, these ranks ask them something else, and gloo ends the process. After the last step
    nothing finds it, and the ranks have different weights.
    """
    end_backward, step = strategy.post_backward, strategy.training_step

    def end_and_check(loss: Tensor) -> None:
        end_backward(loss)
        model = strategy.model
        if not strategy.lightning_module.automatic_optimization:
            return
        # DDP does not notice a loss of no parameter at all.
        if waits_for_gradients(model) and is_without_gradient(model):
            raise unused_parameters(model)
        check_all_are_used(model)

    def step_and_check(*args: Any, **named: Any) -> Any:
        output = step(*args, **named)
        # With manual optimization a step may have several backward passes, each of some parameters.
        if not strategy.lightning_module.automatic_optimization:
            check_all_are_used(strategy.model)
        return output

    strategy.post_backward, strategy.training_step = end_and_check, step_and_check


def waits_for_gradients(model: Any) -> bool:
    """Whether DDP sums the gradients of all parameters in this backward pass."""
    finds_unused = model.find_unused_parameters or model.static_graph
    return model.require_backward_grad_sync and not finds_unused


def is_without_gradient(model: Any) -> bool:
    """Whether the first parameter that is trained has no gradient."""
    # Not all of them: this is asked in each step.
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            return parameter.grad is None
    return False


def check_all_are_used(model: Any) -> None:
    """Raise a ConfigError if DDP has not got the gradients of all parameters that it waits for."""
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        raise unused_parameters(model) from None


def unused_parameters(model: Any) -> ConfigError:
    """The error that names the parameters without a gradient."""
    names = []
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            names.append(name)
    shown = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown += f" and {len(names) - MAX_NAMES} more"
    return ConfigError(
        f"{option('strategy')}: a step leaves parameters of the model without a gradient, and DDP "
        f"waits for them: {shown or 'their gradients are those of earlier steps'}; use "
        f"{setting('strategy', 'ddp_find_unused_parameters_true')}"
    )
