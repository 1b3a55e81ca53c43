"""A fork of a process that has used a GPU must not: without one, its tensors are fake ones."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from library.tests.kit import on_ranks
from library.tests.programs import run_code
from samestep.plugins.forked import ForkError, call_in_fork
from samestep.plugins.step_probe import Step, copy_to_cpu
from samestep.ranks import process_group


def add() -> Any:
    return torch.ones(2) + on_gpu


def stack() -> Any:
    return torch.stack([torch.ones(2), on_gpu])


def copy() -> Any:
    return on_gpu.cpu()


def make() -> Any:
    return torch.ones(2, device="meta")


with FakeTensorMode():
    on_gpu = torch.ones(2, device="cuda")


@pytest.mark.parametrize("function", [add, stack, copy, make])
def test_an_operation_on_a_device_fails_at_once_in_a_fork(function: Any):
    with pytest.raises(ForkError, match=r"RuntimeError: a fork has no device (cuda|meta), which"):
        call_in_fork(function, 100)


def test_a_fork_writes_to_no_file(tmp_path: Path):
    path = tmp_path / "steps"
    with path.open("a") as opened:
        opened.write("1\n")  # not yet in the file

        def write_again() -> None:
            with path.open("a") as again:
                again.write("2\n")

        for function in (write_again, opened.flush):
            with pytest.raises(ForkError, match=r"OSError: .* File too large"):
                call_in_fork(function, 100)
    assert path.read_text() == "1\n"


def differentiate_in_a_fork() -> None:
    weight = torch.ones(2, requires_grad=True)

    def differentiate() -> list[float]:
        loss = torch.cat([weight * 3, weight]).square().sum()
        return torch.autograd.grad(loss, weight)[0].tolist()

    assert call_in_fork(differentiate, 100) == [20, 20]


@pytest.mark.program
def test_operations_on_the_cpu_and_their_gradients_work_in_a_fork():
    # In a process of its own: after gradients on a device, torch calculates none in forks.
    done = run_code(f"from {__name__} import differentiate_in_a_fork as test\ntest()")
    assert done.returncode == 0, done.stderr


class OnDevice(BoringModel):
    """Has a weight of its loss that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device="cuda")
        self.register_buffer("shift", torch.ones(2, device="cuda"))
        self.layer.scale = torch.ones(2, device="cuda")
        self.on_cpu = torch.ones(2)


def test_the_fork_of_the_check_gets_every_tensor_on_the_cpu():
    with FakeTensorMode():
        module = OnDevice()
        weights = copy_to_cpu(module)
    names = {"layer.weight", "layer.bias", "layer.scale", "shift", "on_cpu"}
    assert weights.keys() == names
    assert {value.device.type for value in weights.values()} == {"cpu"}
    # Fake ones cannot be put into a module that is moved.
    weights = {name: torch.ones(value.shape) for name, value in weights.items()}

    def prepare() -> dict[str, str]:
        Step(BoringTrainer(), module, 0, weights).prepare()
        found = {}
        for name in names:
            path, _, last = name.rpartition(".")
            found[name] = getattr(module.get_submodule(path), last).device.type
        return found | {"module": module.device.type}

    assert call_in_fork(prepare, 100) == dict.fromkeys([*names, "module"], "cpu")


class BoringTrainer:
    """What ``prepare`` changes of a Trainer."""

    loggers: Any = ()
    strategy = None


def fork_all() -> None:
    changed: list[int] = []

    def change() -> int:
        changed.append(1)
        print("not seen")
        return len(changed)

    def fail() -> None:
        raise ValueError("wrong")

    def hang() -> None:
        time.sleep(1000)

    def talk() -> float:
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return float(value)

    print([call_in_fork(change, 100), len(changed)])
    for function, timeout_s in ((fail, 100), (hang, 0.1), (talk, 100)):
        try:
            call_in_fork(function, timeout_s)
        except ForkError as error:
            print(error)
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    print(float(value))


def fork_in_ranks() -> None:
    process_group.init("cpu", 60)
    with process_group.shared_errors():
        fork_all()


@pytest.mark.program
def test_a_fork_changes_nothing_and_knows_no_ranks():
    done = on_ranks(fork_in_ranks)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    first, failed, hung, alone, summed = said[: len(said) // 2]
    assert first == "[1, 0]"
    assert failed == "ValueError: wrong"
    assert hung == "it did not end within 0.1 s, or was killed"
    assert "process group has not been initialized" in alone
    assert summed == "2.0"
