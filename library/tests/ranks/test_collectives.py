"""Groups whose backend takes no tensor on the CPU, as NCCL's: one program for each kind."""

import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import samestep
from library.tests.kit import Normalized, fit, on_ranks
from library.tests.programs import run_code
from samestep import losses
from samestep.metrics import EpochMean
from samestep.ranks import collectives, environment, process_group, stopping

REJECTED = "No backend type associated with device type cpu"
OPERATIONS = (
    "all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "recv", "send",
)  # fmt: skip


def use_group_for_gpus_only() -> None:
    """Exchange numbers in a group that a script has made, twice."""
    rank = environment.rank()
    dist.Backend.register_backend("strict", dist.ProcessGroupGloo, devices=["cuda"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # One store: rank 1 could meet that of the first group when it makes the second.
    store = dist.TCPStore(*address, world_size=2, is_master=rank == 0)
    for group in ("first", "second"):
        own = dist.PrefixStore(group, store)
        dist.init_process_group("strict", store=own, rank=rank, world_size=2)
        with pytest.raises(RuntimeError, match=REJECTED):
            dist.all_reduce(torch.tensor(1))
        assert stopping.agreed(save=rank == 1) == stopping.Agreement(save=True)
        assert process_group.gather(rank) == [0, 1]
        assert process_group.broadcast(rank, source=1) == 1
        assert losses.Ranks().total(torch.tensor(rank + 1.0)) == 3
        slices = losses.Ranks().slices(torch.full((rank + 1,), float(rank)))
        assert [slice_.tolist() for slice_ in slices] == [[0], [1, 1]]
        mean = EpochMean("train", "loss")
        mean.update(rank + 1, loss=torch.tensor(3.0 * rank))
        assert mean.means()["train/loss"] == 1
        block = torch.tensor([rank])
        if rank == 0:
            collectives.send(block, 1)
        else:
            collectives.receive(block, 0)
        assert block.tolist() == [0]
        dist.destroy_process_group()
    # Rank 0 has the store, which the other one still asks.
    store.set(f"ended-{rank}", "")
    store.wait(["ended-0", "ended-1"])


@pytest.mark.program
def test_a_group_of_nccl_alone_gets_a_group_for_the_cpu_beside_it():
    done = on_ranks(use_group_for_gpus_only)
    assert done.returncode == 0, done.stderr


def reject_tensors_on_the_cpu() -> None:
    """Let the library find a group of NCCL alone; Lightning and torch use gloo, as they must here.

    It takes the part of NCCL in a whole run, which has no tensor on a GPU.
    """
    mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl").start()
    for name in OPERATIONS:
        operation = getattr(dist, name)

        def call(*args: Any, operation: Any = operation, **named: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.startswith("samestep.") and named.get("group") is None:
                raise RuntimeError(REJECTED)
            return operation(*args, **named)

        mock.patch.object(dist, name, call).start()


class Shares(Normalized):
    """Needs the other slices of a batch for its loss."""

    def loss(self, batch: Any) -> torch.Tensor:
        own = super().loss(batch)
        gathered = samestep.gather_batch(own[None])
        return samestep.mean(gathered)


def train_on_gpus_only(folder: str, **options: Any) -> None:
    """A run with all its collective operations, which is stopped and continued."""
    reject_tensors_on_the_cpu()
    parts = fit(Path(folder), Shares, places=[(0, 1), (1, "validation")], **options)
    assert parts[-1].trainer.global_step == 8
    assert len(parts) == 3


@pytest.mark.program
def test_a_run_goes_through_no_backend_that_rejects_its_tensors(tmp_path: Path):
    done = on_ranks(train_on_gpus_only, str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.program
def test_ddp_on_one_device_trains_in_the_group_that_lightning_makes(tmp_path: Path):
    code = (
        "from library.tests.ranks.test_collectives import train_on_gpus_only\n"
        f"train_on_gpus_only({str(tmp_path)!r}, strategy='ddp')\n"
        "from torch import distributed\n"
        "assert distributed.is_initialized()\n"
    )
    done = run_code(code)
    assert done.returncode == 0, done.stderr


def test_nothing_else_calls_a_collective_operation():
    called = re.compile(rf"\bdist(?:ributed)?\.({'|'.join(OPERATIONS)})\(")
    files = Path(samestep.__file__).parent.rglob("*.py")
    users = {path.name for path in files if called.search(path.read_text())}
    assert users == {"collectives.py", "process_group.py"}
