"""FSDP2: weights, gradients and optimizer state are distributed over all ranks.

The plug-in of ``strategy="fsdp"``.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.plugins import shards
from samestep.ranks import collectives, environment
from samestep.ranks.gradients import parameters_of
from samestep.ranks.strategies import class_of
from samestep.run.checkpoint import map_tensors

LISTS = (nn.ModuleList, nn.Sequential)  # their items are blocks of a model
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedStrategy(ModelParallelStrategy):
    """Trains a module that was written for DDP with ``fully_shard`` over all ranks.

    A module that shards itself in ``configure_model`` is not sharded again. ``AtomicCheckpointIO``
    writes the checkpoints: every rank its own part of the tensors, rank zero all the rest. A run
    can resume from a checkpoint on any number of ranks, and with any strategy.
    """

    is_sharded = True
    # Lightning's strategy leaves the optimizers, and the order of restoring, to torch's distributed
    # checkpoints. Ours are Lightning's own, so all of this is as in other strategies.
    lightning_restore_optimizer = True
    # Before ``configure_optimizers``, which may ask for the length of the data, and so begin them.
    restore_checkpoint_after_setup = False
    lightning_module_state_dict = Strategy.lightning_module_state_dict
    optimizer_state = Strategy.optimizer_state
    load_checkpoint = Strategy.load_checkpoint

    def __init__(self, **options: Any) -> None:
        cluster_environment = options.pop("cluster_environment", None)
        super().__init__(environment.world_size(), tensor_parallel_size=1, **options)
        self.cluster_environment = cluster_environment

    def setup_environment(self) -> None:
        """Meet the other ranks, and let Lightning shard the module where it configures it."""
        super().setup_environment()
        if self.root_device.type == "cpu" and not collectives.averages_on_cpu():
            raise ConfigError(
                f"{setting('strategy', 'fsdp')}: torch {torch.__version__} does not average the "
                f"gradients on CPUs; use {setting('strategy', 'ddp')}, a newer torch, or GPUs"
            )
        module: Any = self.lightning_module
        for callback in module.trainer.callbacks:
            if averages_weights(callback):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__} is not supported with "
                    f"{setting('strategy', 'fsdp')}: torch cannot copy a sharded model; use ddp"
                )
        checkpoint_io: Any = self.checkpoint_io
        # Any number of ranks may have written the checkpoint. It is read part by part, because the
        # whole model may not fit into the memory of one rank.
        checkpoint_io.assemble = self._assemble
        mesh = self.device_mesh["data_parallel"]
        configure = module.configure_model

        def configure_and_shard() -> None:
            configure()
            has_sharded_itself = any(isinstance(each, DTensor) for each in module.parameters())
            if not has_sharded_itself:
                shard(module, mesh)
            materialize(module, self.root_device)

        module.configure_model = configure_and_shard

    def model_to_device(self) -> None:
        """Move what is elsewhere, and leave a module alone that is there.

        To move a sharded weight, torch 2.15 swaps it with another one, and raises if anything has a
        weak reference to it, as the heap has after a fit.
        """
        assert self.lightning_module is not None
        tensors = chain(self.lightning_module.parameters(), self.lightning_module.buffers())
        if any(tensor.device != self.root_device for tensor in tensors):
            super().model_to_device()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Free the weights after the step: no backward pass does it here."""
        return self._reshard_after(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Free the weights after the step."""
        return self._reshard_after(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Free the weights after the step."""
        return self._reshard_after(super().predict_step(*args, **kwargs))

    def _reshard_after(self, result: Any) -> Any:
        """Give up the weights that this rank has gathered for a step; return its result."""
        assert self.lightning_module is not None
        for part in self.lightning_module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return result

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write this rank's part of all sharded tensors, and on rank zero the rest.

        Raises:
            ConfigError: if a tensor is sharded in another way than over all ranks.
        """
        checkpoint_io: Any = self.checkpoint_io
        # A callback of the user may save while a thread still writes for the run.
        checkpoint_io.commit()
        part: dict[str, Tensor] = {}
        dims: dict[str, int] = {}

        def cut(path: str, tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            self._check_mesh(path, tensor)
            placement = tensor.placements[0]
            if not isinstance(placement, Shard):
                dims[path] = -1
                return tensor.full_tensor().cpu()
            dims[path] = placement.dim
            part[path] = local_part(tensor)
            # In the file of rank zero only the shape is left.
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        checkpoint = map_tensors(checkpoint, cut) | {"sharded": dims}
        shards.save(checkpoint_io, checkpoint, part, self.broadcast(filepath))

    def _check_mesh(self, path: str, tensor: DTensor) -> None:
        """Raise a ConfigError if a tensor is not distributed over all ranks, once."""
        mesh = tensor.device_mesh
        if mesh.ndim > 1 or mesh.size() != self.world_size:
            raise ConfigError(
                f"{path}: is sharded over a part of the ranks, or twice; checkpoints hold "
                "tensors that fully_shard has distributed over all ranks"
            )

    def _assemble(self, tensor: Tensor, dim: int, read: Callable[[int, int], Tensor]) -> Tensor:
        """Make this rank's part of a saved tensor.

        Args:
            tensor: as rank zero has saved it; on the device meta if it is sharded.
            dim: in which it is sharded; negative if every rank has all of it.
            read: reads a range of it in this dimension, whichever ranks have saved it.
        """
        mesh = self.device_mesh["data_parallel"]
        if dim < 0:
            local = tensor.to(self.root_device)
            return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        start, end = shards.part_of(tensor.shape[dim], self.global_rank, self.world_size)
        return DTensor.from_local(
            read(start, end).to(self.root_device),
            mesh,
            [Shard(dim)],
            # The check would be a collective operation for each tensor.
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, also whole ones that another strategy has written."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        weights = copy.copy(checkpoint["state_dict"])
        for name, value in weights.items():
            weights[name] = shard_like(value, own.get(name))
        self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, also whole states that another strategy has written."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            for number, parameter in enumerate(parameters_of(optimizer)):
                # A parameter that never had a gradient has no state.
                state = saved["state"].get(number, {})
                for name, value in state.items():
                    state[name] = shard_like(value, parameter)
        Strategy.load_optimizer_state_dict(self, checkpoint)


def averages_weights(callback: object) -> bool:
    """Whether a callback is a WeightAveraging, which Lightning has since 2.6."""
    kind: type | None = getattr(callbacks, "WeightAveraging", None)
    return kind is not None and isinstance(callback, kind)


def shard(module: LightningModule, mesh: DeviceMesh) -> None:
    """Shard each block of the module, and then the rest of it.

    Raises:
        ConfigError: if a parameter cannot be sharded.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"{setting('strategy', 'fsdp')}: {name} is a number without dimensions, which "
                "torch cannot shard; make it a tensor of one value: "
                "torch.nn.Parameter(torch.ones(1))"
            )
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    if module.automatic_optimization:
        # Its steps count as forward passes, so weights that no block holds are gathered for them.
        fully_shard(module, mesh=mesh)
        for name in STEPS:
            register_fsdp_forward_method(module, name)
        return
    # With manual optimization the backward pass is within the step, where the weights of the module
    # itself are still gathered. So each part of the module is sharded on its own.
    for part in parts_of(module):
        is_block = isinstance(part, FSDPModule)
        if not is_block and has_parameters(part):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate the weights that ``configure_model`` has left on the device meta, and reset them.

    Lightning 2.6 does the same, but only after the checkpoint is restored, which it would undo. It
    leaves alone a module without such weights.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return
    module.to_empty(device=device)
    uninitialized: set[str] = set()
    for part in module.modules():
        if not [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            continue
        reset = getattr(part, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            uninitialized.add(class_of(part).__name__)
    if uninitialized:
        names = ", ".join(sorted(uninitialized))
        rank_zero_warn(
            f"{names}: have no method reset_parameters(), so their weights and buffers have "
            "no initial values"
        )


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; instead of a list or a dictionary its children."""
    for child in module.children():
        # These have no forward pass, before which their weights could be gathered.
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from parts_of(child)
        else:
            yield child


def has_parameters(module: nn.Module) -> bool:
    """Whether the module has parameters, its own or those of its children."""
    return next(module.parameters(), None) is not None


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Find the items of each ModuleList and Sequential with children, and weights of their own."""
    owners = find_owners(module)
    found: list[nn.Module] = []

    def search(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            path = f"{prefix}{name}."
            # A single layer is too small: each block costs a collective operation per pass.
            is_item = isinstance(parent, LISTS) and not isinstance(child, LISTS)
            is_large = next(child.children(), None) is not None
            if is_item and is_large and owns_parameters(child, path, owners):
                found.append(child)
            else:
                search(child, path)

    search(module, "")
    return found


def find_owners(module: nn.Module) -> dict[int, set[str]]:
    """Find all names of each parameter, by its id; a tied parameter has several."""
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    return owners


def owns_parameters(module: nn.Module, path: str, owners: Mapping[int, set[str]]) -> bool:
    """Whether the module at ``path`` has parameters, and no other module uses them."""
    # A parameter that is tied to one elsewhere must be gathered when either is used.
    for parameter in module.parameters():
        for name in owners[id(parameter)]:
            if not name.startswith(path):
                return False
    return has_parameters(module)


def local_part(tensor: DTensor) -> Tensor:
    """This rank's part of a tensor, in memory that has nothing else."""
    local = tensor.to_local().detach()
    # fully_shard pads the last part, and torch saves the memory of a tensor, not its values.
    is_padded = local.untyped_storage().nbytes() > local.nbytes
    return local.clone() if is_padded else local


def shard_like(value: Any, target: Any) -> Any:
    """Shard a whole tensor as ``target``, if they have the same shape; return others unchanged."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_whole or not isinstance(target, DTensor):
        return value
    # Such as the step of an optimizer, which is one number for each parameter.
    if value.shape != target.shape:
        return value
    whole = value.to(target.device)
    # Every rank has read all of it, so none must send it to the others.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
