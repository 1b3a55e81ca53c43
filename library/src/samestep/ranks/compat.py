"""The private names of other libraries that we use, with the version and the reason.

``samestep.loops`` has those of Lightning's loops, ``epoch_logs`` those of its logs, and
``samestep.node.torch_agent`` those of torchrun's agent. Each has a canary test in library/tests,
which fails when the other library has changed; pyproject.toml bounds the versions from above.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from samestep import versions
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import environment

if TYPE_CHECKING:
    import lightning as L  # takes seconds to import
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.strategies import DDPStrategy
    from torch import nn


Kind = TypeVar("Kind")

MAX_NAMES = 5  # of parameters in a message


def callbacks_of(trainer: "L.Trainer", kind: type[Kind]) -> list[Kind]:
    """The callbacks of one kind; the types of Lightning 2.6 know no callbacks of a Trainer."""
    return of_kind(trainer.callbacks, kind)  # type: ignore[attr-defined]


def of_kind(things: Iterable[object], kind: type[Kind]) -> list[Kind]:
    """Those of several objects that are of one class, or of a subclass of it."""
    return [thing for thing in things if isinstance(thing, kind)]


def apply(trainer: "L.Trainer") -> None:
    """Change what Lightning has no switch for, in every run."""
    versions.check()
    leave_signals_to_us(trainer)
    search_gpus_once()
    name_arguments_of_loaders()
    wrap_again_when_unfrozen(trainer)
    note_early_stops()
    unscale_before_clipping(trainer)
    find_unused_parameters(trainer)
    clip_by_known_norm(trainer)


def unwrap_compiled(model: Any) -> "L.LightningModule":
    """The LightningModule in what ``torch.compile`` has made of one; its steps stay compiled.

    Lightning 2.6 has no public function that takes both kinds, and changes the module in place.
    """
    from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized

    # Unwrapped twice, its compiled methods would be compiled again.
    is_unwrapped = getattr(getattr(model, "_orig_mod", None), "_compiler_ctx", None) is not None
    return model._orig_mod if is_unwrapped else _maybe_unwrap_optimized(model)


def leave_signals_to_us(trainer: "L.Trainer") -> None:
    """Keep Lightning 2.6 from handling SIGTERM.

    Its handler talks to the other ranks in the middle of a step, and hangs there. There is no
    public switch. Our way is samestep.ranks.stopping; ``EpochLoop`` leaves out the broadcast in
    each step. Upstream: Lightning-AI/pytorch-lightning issues 20806 and 21487.
    """
    ours: Any = trainer
    ours._signal_connector.register_signal_handlers = lambda: None


def has_parts(tensor: Tensor) -> bool:
    """Whether a tensor consists of others; torch 2.15 says so in no public function."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def saved_tensors(module: "nn.Module") -> dict[str, Tensor]:
    """What torch expects of a ``state_dict``: parameters and persistent buffers, by their names.

    A module's own ``state_dict`` may leave some out. torch 2.15 says in no public attribute which
    buffers are persistent.
    """
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


SAVER_STATE = "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"
"""What decides in Lightning 2.6 whether a ModelCheckpoint saves, and is not in its state."""


def read_saver(saver: Any) -> dict[str, Any]:
    """What a ModelCheckpoint forgets in a checkpoint: whether it has saved, and at which step.

    A run that continues would save its last weights again, where an undisturbed one does not.
    """
    return {name: getattr(saver, name) for name in SAVER_STATE if hasattr(saver, name)}


def set_saver(saver: Any, state: Mapping[str, Any]) -> None:
    """Give a ModelCheckpoint what ``read_saver`` has read."""
    for name, value in state.items():
        setattr(saver, name, value)


PLACES = "_version", "_id", "_run_id"
"""Where Lightning 2.6 keeps what a logger was told, or has chosen: a version, or the id of a run.

The public properties would choose a new one.
"""


def place_of(logger: Any) -> Any:
    """The version of a logger on disk, or the id of W&B or MLflow; None if it will be a new one."""
    if is_open(logger):
        return logger.version
    return next(getattr(logger, name) for name in PLACES if hasattr(logger, name))


def set_place(logger: Any, place: Any) -> None:
    """Let a logger that was not used yet log there."""
    for name in PLACES:
        if hasattr(logger, name):
            setattr(logger, name, place)
    # The arguments of wandb.init.
    if hasattr(logger, "_wandb_init"):
        logger._wandb_init["id"] = place


def project_of(logger: Any) -> str:
    """What tells a logger from others of its kind: its folder, project or experiment."""
    if hasattr(logger, "_experiment_name"):  # of MLflow, whose public name creates a run
        return f"{logger._tracking_uri} {logger._experiment_name}"
    return str(getattr(logger, "root_dir", None) or logger.name)


def is_open(logger: Any) -> bool:
    """Whether a logger was used; the public ``experiment`` of Lightning 2.6 would open it."""
    experiment = getattr(logger, "_experiment", None)
    return experiment is not None or getattr(logger, "_initialized", False)


def log_no_first_metric(logger: Any) -> None:
    """Keep a TensorBoardLogger of Lightning 2.6 from logging ``hp_metric`` at step 0 once more."""
    logger._default_hp_metric = False


def hide_events_from(logger: Any, step: int | None) -> None:
    """Let TensorBoard hide what earlier processes have logged from ``step`` on; None hides none."""
    if is_open(logger):
        # Of an earlier ``fit`` in this process.
        logger.experiment.close()
        logger._experiment = None
    logger._kwargs["purge_step"] = step


def append_to_csv(logger: Any, names: list[str]) -> None:
    """Let a CSVLogger add to its file, whose columns are ``names``.

    The writer of Lightning 2.6 deletes the file of an earlier process, and warns of it.
    """
    from lightning.pytorch.core.saving import load_hparams_from_yaml
    from lightning.pytorch.loggers.csv_logs import ExperimentWriter

    class AppendingWriter(ExperimentWriter):
        def _check_log_dir_exists(self) -> None:
            """Keep the file."""

    logger._experiment = AppendingWriter(logger.log_dir)
    logger._experiment.metrics_keys = names
    # It would write those of this process only.
    path = Path(logger.log_dir, ExperimentWriter.NAME_HPARAMS_FILE)
    if path.is_file():
        logger._experiment.hparams = load_hparams_from_yaml(path)


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


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of this name in the installed version."""
    return name in inspect.signature(function).parameters


def without_sync_in_forward() -> dict[str, bool]:
    """The option with which DDP sends no buffers from rank zero in each forward pass.

    Before torch 2.15 it is the one that also leaves out the first time; see ``sync_buffers``.
    """
    from torch.nn.parallel import DistributedDataParallel

    if takes(DistributedDataParallel.__init__, "forward_sync_buffers"):
        return {"forward_sync_buffers": False}
    return {"broadcast_buffers": False}


def sync_buffers(strategy: Any) -> None:
    """Give all ranks the buffers of rank zero, where DDP before torch 2.15 does not."""
    from samestep.ranks import collectives

    option = without_sync_in_forward()
    # Newer versions send them themselves. So does one that the user has told to.
    if "broadcast_buffers" in option and option.items() <= strategy._ddp_kwargs.items():
        for buffer in strategy.model.buffers():
            collectives.broadcast(buffer)


def wrap_again_when_unfrozen(trainer: "L.Trainer") -> None:
    """Let DDP of torch 2.15 follow a model whose parameters are frozen or unfrozen while it trains.

    DDP sums the gradients of those parameters that needed one when it was made. Each rank would
    train a parameter that is unfrozen later by its own samples, and the ranks would end with
    different weights; for one that is frozen later, DDP waits in vain. Callbacks for fine-tuning
    do both. So the model is wrapped again before the step. Upstream:
    Lightning-AI/pytorch-lightning issue 20340.
    """
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.parallel import DistributedDataParallel

    strategy: Any = trainer.strategy
    if DDPStrategy not in type(strategy).__mro__:
        return
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


def find_unused_parameters(trainer: "L.Trainer") -> None:
    """Let a step that leaves out parameters end the run at once, with their names.

    DDP of torch 2.15 waits for the gradients of all parameters. It finds one that was left out when
    the next step begins. If only some ranks leave it out, the others wait until then for a sum of
    gradients, these ranks ask them something else, and gloo ends the process. After the last step
    nothing finds it, and the ranks have different weights.
    """
    from lightning.pytorch.strategies import DDPStrategy

    strategy: Any = trainer.strategy
    if DDPStrategy not in type(strategy).__mro__:
        return
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


ENDS_RUN = "_samestep_ends_run"
"""An attribute of an EarlyStopping of Lightning 2.5, once it has ended the run."""


def has_ended_run(stopping: "EarlyStopping") -> bool:
    """Whether an EarlyStopping has ended the run; Lightning 2.6 says so by a reason."""
    reason = getattr(stopping, "stopping_reason", None)
    return getattr(stopping, ENDS_RUN, False) if reason is None else bool(reason.value)


@cache  # once in a process, which may have several runs
def note_early_stops() -> None:
    """Let an EarlyStopping of Lightning 2.5 say that it has ended the run, as that of 2.6 does.

    It keeps the number of the epoch only, which is 0 in the first epoch and without a stop.
    """
    from lightning.pytorch.callbacks import EarlyStopping, early_stopping

    if hasattr(early_stopping, "EarlyStoppingReason"):
        return
    kind: Any = EarlyStopping
    evaluate = kind._evaluate_stopping_criteria

    @wraps(evaluate)
    def evaluate_and_note(stopping: Any, current: Tensor) -> tuple[bool, Any]:
        ends_run, reason = evaluate(stopping, current)
        if ends_run:
            setattr(stopping, ENDS_RUN, True)
        return ends_run, reason

    kind._evaluate_stopping_criteria = evaluate_and_note


def averages_weights(callback: object) -> bool:
    """Whether a callback is a WeightAveraging, which Lightning has since 2.6."""
    from lightning.pytorch import callbacks

    kind: type | None = getattr(callbacks, "WeightAveraging", None)
    return kind is not None and isinstance(callback, kind)


@cache  # once in a process, which may have several runs
def watch_sanity_checks() -> None:
    """Let a Trainer know whether a module has asked it if this is the sanity check.

    Lightning 2.6 has one public property for that, and asks it itself. What such a module does in
    the sanity check says nothing about its validations.
    """
    import lightning as L

    asked: Any = L.Trainer.sanity_checking

    def is_sanity_check(trainer: L.Trainer) -> bool:
        is_checking = bool(asked.fget(trainer))
        if is_checking:
            asker = sys._getframe(1)
            package = asker.f_globals.get("__name__", "").partition(".")[0]
            # Callbacks log for themselves, and a progress bar asks in each run.
            is_callback = isinstance(asker.f_locals.get("self"), L.Callback)
            if package not in ("lightning", "samestep") and not is_callback:
                vars(trainer)["module_knows_sanity_checks"] = True
        return is_checking

    L.Trainer.sanity_checking = property(is_sanity_check, asked.fset)  # type: ignore[method-assign, assignment]


@cache  # once in a process, which may have several runs
def before_hooks(function: Callable[["L.Trainer", str], None]) -> None:
    """Let ``function`` act before each hook that Lightning 2.6 calls, with the hook's name.

    A callback cannot: Lightning calls those of a DataModule before the callbacks', and some hooks
    are of the module alone, such as ``train_dataloader``.
    """
    from lightning.pytorch.trainer import call

    def wrap(call_hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call_hook)
        def act_and_call(trainer: "L.Trainer", name: str, *args: Any, **named: Any) -> Any:
            function(trainer, name)
            return call_hook(trainer, name, *args, **named)

        return act_and_call

    hooks: Any = call
    hooks._call_lightning_datamodule_hook = wrap(hooks._call_lightning_datamodule_hook)
    hooks._call_callback_hooks = wrap(hooks._call_callback_hooks)
    hooks._call_lightning_module_hook = wrap(hooks._call_lightning_module_hook)


@cache  # once in a process, which may have several runs
def reject_tuner(kind: type, error_of: Callable[[str], Exception]) -> None:
    """Let the methods of Lightning's Tuner raise an error with a Trainer of one kind.

    Before they call the Trainer: on several ranks that of Lightning 2.6 is a traceback.
    """
    from lightning.pytorch.tuner.tuning import Tuner

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def raise_or_call(tuner: Any, *args: Any, **options: Any) -> Any:
            if isinstance(tuner._trainer, kind):
                raise error_of(name)
            return call(tuner, *args, **options)

        return raise_or_call

    for name in ("lr_find", "scale_batch_size"):
        setattr(Tuner, name, wrap(name, getattr(Tuner, name)))


def clip_by_known_norm(trainer: "L.Trainer") -> None:
    """Let Lightning 2.6 clip gradients by the norm that the guard has computed, to the same bits.

    A plugin that clips in its own way is left alone.
    """
    from lightning.pytorch.plugins.precision import Precision
    from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

    from samestep.ranks.gradients import known_norm

    plugin: Any = trainer.precision_plugin
    if type(plugin).clip_grad_by_norm is not Precision.clip_grad_by_norm:
        return

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = [*plugin.main_params(optimizer)]
        norm = known_norm([p.grad for p in parameters if p.grad is not None])
        if norm is None:
            clip_grad_norm_(parameters, clip_val)
        else:
            clip_grads_with_norm_(parameters, clip_val, norm)

    plugin.clip_grad_by_norm = clip


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


def replace_batch_samplers(trainer: "L.Trainer", share: Callable[[Any, str], Any]) -> None:
    """Let DataLoaders get another batch sampler when Lightning takes them.

    Lightning 2.6 replaces a ``BatchSampler`` of torch by samples one at a time, without a word. It
    rejects other batch samplers, with the advice of a flag that shares nothing out. ``share`` gets
    a loader and a stage (``train``, ``validate``, ``test``, ``predict``), and returns this rank's
    batch sampler, or None for what Lightning does. Upstream:
    Lightning-AI/pytorch-lightning issue 21122.
    """
    from torch.utils.data import DataLoader

    connector = trainer._data_connector
    prepare: Callable[..., Any] = connector._prepare_dataloader

    def prepare_dataloader(dataloader: Any, shuffle: bool, mode: Any) -> Any:
        batches = None
        if isinstance(dataloader, DataLoader):
            batches = share(dataloader, mode.value)
        if batches is None:
            return prepare(dataloader, shuffle, mode)
        # DataLoader raises where this attribute is assigned.
        vars(dataloader)["batch_sampler"] = batches
        return dataloader

    connector._prepare_dataloader = prepare_dataloader  # type: ignore[method-assign]


def repeats_shorter_loaders(trainer: "L.Trainer") -> bool:
    """Whether the shorter ones of several training loaders begin again within an epoch."""
    loaders: Any = trainer.fit_loop._combined_loader
    return len(loaders.flattened) > 1 and loaders._mode == "max_size_cycle"


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader the epoch, as Lightning 2.6 does when it begins one.

    In a run that continues, loader processes ask for their first batches before that.
    """
    from lightning.fabric.utilities.data import _set_sampler_epoch

    _set_sampler_epoch(loader, epoch)


def distributed_sampler(sampler: Any) -> Any:
    """The sampler whose order Lightning 2.6 distributes over the ranks by ``sampler``; or None."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    is_wrapper = isinstance(sampler, DistributedSamplerWrapper)
    return sampler.dataset._sampler if is_wrapper else None


def number_batches(loaders: Any, first: int) -> None:
    """Let the next batch of a CombinedLoader of Lightning 2.6 have this number."""
    loaders._iterator._idx = first


def before_each_order(loader: Any, function: Callable[[], None]) -> None:
    """Let ``function`` act before each order that a sampler draws which is distributed so."""
    samplers: list[Any] = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers:
        if distributed_sampler(sampler) is None:
            continue
        orders: Any = sampler.dataset
        draw = type(orders).reset

        def act_and_draw(orders: Any = orders, draw: Any = draw) -> None:
            function()
            draw(orders)

        orders.reset = act_and_draw


def end_restored_pass(loader: Any) -> None:
    """Let a loader begin its next epoch at the beginning, after one that resumed from a state.

    litdata 0.2 forgets the state only when it is read to the end. Lightning counts the batches and
    stops at the last one, so the next epoch would begin in the middle too. A stream of ``datasets``
    5.2 never forgets it: as long as its ``set_epoch`` is not called, each later epoch begins where
    the state says.
    """
    if getattr(loader, "restore", False) is True:
        loader.restore = False
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "_starting_state_dict"):
        return
    # An empty state restores nothing, and neither do these calls in an epoch of another number.
    dataset.load_state_dict({})
    # Loader processes that outlive the epoch have a data set with the state; new ones have not.
    if getattr(loader, "persistent_workers", False):
        loader.load_state_dict({})


def skip_fused_step(optimizer: Optimizer, skip: Tensor) -> None:
    """Let a fused optimizer of torch 2.15 skip its next step if ``skip``, a float32, is 1.

    torch's GradScaler sets these attributes. Nothing else tells a fused optimizer to skip a step
    without the process having to wait for the device.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]


def norms_of_each(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norms of gradients of one type on one device, by one operation.

    torch 2.15 computes the norm of all of them from these; its public function returns that alone.
    """
    import torch

    with torch.no_grad():
        return [*torch._foreach_norm([*gradients], 2)]


def mark_if_not_finite(norms: Sequence[Tensor], flag: Tensor) -> None:
    """Set ``flag``, a float32 of 0, to 1 if one of the norms is infinite or nan.

    torch's GradScaler finds them so. It is one operation, and public ones would be five. It also
    multiplies by a scale, which is 1.
    """
    import torch

    torch._amp_foreach_non_finite_check_and_unscale_([*norms], flag, one_on(flag.device))


@cache
def one_on(device: Any) -> Tensor:
    """The number 1 on a device."""
    import torch

    return torch.ones((), device=device)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place, which autograd of torch 2.15 counts."""
    return [tensor._version for tensor in tensors]


def add_ddp_options(strategy: "DDPStrategy", options: Mapping[str, Any]) -> None:
    """Give a DDPStrategy that exists further options; those that it has stay.

    Lightning keeps the options of DistributedDataParallel in the strategy until it wraps the model,
    and has no public way to read or add them.
    """
    strategy._ddp_kwargs = {**options, **strategy._ddp_kwargs}


def forget_sharding(module: Any) -> None:
    """Make a module of FSDP2 an ordinary one, in a fork; its weights must be gathered.

    torch 2.15 has no public way back: the hooks would gather the weights again, together with the
    other ranks. Only the loss check needs it, which reports an error of this as "not checked".
    """
    from torch.distributed.fsdp import FSDPModule

    from samestep.ranks.sharded import STEPS, class_of

    for part in [*module.modules()]:
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        # The methods that count as forward passes are wrapped.
        for name in STEPS:
            vars(part).pop(name, None)
        part.__class__ = class_of(part)


def destroy_groups() -> None:
    """Destroy all process groups; the GIL is free while their threads end.

    A thread of gloo needs the GIL to give up the last tensor that it has sent. Before torch 2.8 a
    group keeps the GIL while it waits for these threads, so that the process may hang. A backend
    releases it. Upstream: pytorch/pytorch pull request 154976.
    """
    from torch import distributed as dist

    backends = backends_of_groups()
    dist.destroy_process_group()
    # Last, or a group would destroy its backends itself.
    backends.clear()


def backends_of_groups() -> list[Any]:
    """The gloo and NCCL of every process group; nothing here may keep a group itself."""
    from torch.distributed.distributed_c10d import _world

    backends: list[Any] = []
    for group in _world.pg_map:
        for device in group._device_types:
            backends.append(group._get_backend(device))
    return backends


def leave_ranks() -> None:
    """Forget the process group in a fork, whose connections belong to the parent; torch 2.15."""
    from torch import distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.distributed_c10d.GroupMember.WORLD = None
