"""What ``devices`` means on four GPUs, and on none."""

from collections import UserList
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.device_parser import _parse_gpu_ids

from samestep.errors import ConfigError
from samestep.plugins import device_option, starting
from samestep.ranks import devices as gpus
from samestep.ranks import environment

ON_GPUS = {  # processes, by what is typed
    2: 2, "2": 2, 1: 1, "1": 1, "auto": 4, -1: 4, "-1": 4, "0,1": 2, "3, 1": 2, "1,": 1,
}  # fmt: skip
OF_HYDRA = UserList([3, 0])  # a sequence and no list, as its ListConfig
LISTS: list[tuple[Any, int]] = [([1], 1), ([1, 3], 2), ((0, 2), 2), (OF_HYDRA, 2)]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(("devices", "num"), [*ON_GPUS.items(), *LISTS])
def test_as_many_processes_as_lightning_takes_gpus(
    monkeypatch: pytest.MonkeyPatch, four_gpus: None, devices: Any, num: int
):
    for accelerator in ("auto", "gpu", "cuda"):
        assert starting.num_processes(accelerator, devices, 1) == num
    parser = "lightning.fabric.accelerators.cuda._get_all_visible_cuda_devices"
    monkeypatch.setattr(parser, lambda: [0, 1, 2, 3])
    if devices != "auto":
        found = _parse_gpu_ids(devices, include_cuda=True)
        assert found is not None
        assert len(found) == num


@pytest.mark.parametrize(
    ("accelerator", "devices", "message"),
    [
        ("gpu", [4], r"devices=\[4\]: this machine has 4 GPUs, counted from 0"),
        ("gpu", [1, 1], "must be a number of processes"),
        ("gpu", [], "must be a number of processes"),
        ("gpu", 0, "devices=0: must be a number of processes"),
        ("gpu", True, "must be a number of processes"),
        ("gpu", "two", "devices=two: must be a number of processes"),
        ("gpu", ["cuda:0"], "must be a number of processes"),
        ("gpu", 5, "this machine has 4 GPUs; choose fewer"),
        ("cpu", [0, 1], "names GPUs, and this run is on CPUs"),
        ("cpu", -1, "means all GPUs, and there are none"),
    ],
)
def test_what_cannot_be_meant_is_one_message(
    four_gpus: None, accelerator: str, devices: Any, message: str
):
    with pytest.raises(ConfigError, match=message):
        starting.num_processes(accelerator, devices, 1)


def test_processes_on_cpus():
    for devices, num in ((3, 3), ("3", 3), ("auto", 1)):
        assert starting.num_processes("cpu", devices, 1) == num


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        (None, [3, 1], "3,1"),
        ("4,5,6,7", "1,3", "5,7"),
        ("GPU-aa, MIG-bb", [1], "MIG-bb"),
        ("4,5", 2, "4,5"),
    ],
)
def test_ranks_see_the_gpus_that_are_named(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: Any, seen: str
):
    # Set first, so that what the function sets is taken back where nothing was set before.
    monkeypatch.setenv(device_option.VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(device_option.VISIBLE)
    device_option.name_to_ranks(devices)
    assert environment.variable(device_option.VISIBLE) == seen


def test_ranks_of_torchrun_take_the_first_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "under_torchrun", lambda: True)
    assert starting.num_processes("gpu", [0, 1], 1) == 1
    with pytest.raises(ConfigError, match="start them with CUDA_VISIBLE_DEVICES=1,3"):
        starting.num_processes("gpu", [1, 3], 1)
    monkeypatch.setenv(environment.RUN_DIRS, "[]")  # by our own agent
    assert starting.num_processes("gpu", [1, 3], 1) == 1


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
def test_a_mac_has_one_gpu(monkeypatch: pytest.MonkeyPatch, accelerator: str):
    monkeypatch.setattr(gpus, "has_mps", lambda: True)
    for devices in (1, "auto", -1, [0], "0,"):
        assert starting.num_processes(accelerator, devices, 1) == 1
    with pytest.raises(ConfigError, match="devices=2: this machine has 1 GPUs; choose fewer"):
        starting.num_processes(accelerator, 2, 1)
    assert starting.num_processes("cpu", 2, 1) == 2
