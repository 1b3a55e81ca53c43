"""What is different on a GPU of Apple, where there is none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep.ranks import devices
from samestep.ranks.process_group import device_kind


def test_an_apple_gpu_is_used_as_lightning_would(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert devices.module_of_gpu() is None
    assert device_kind("auto") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.module_of_gpu() is torch.mps
    assert [device_kind(name) for name in ("auto", "gpu", "mps")] == ["mps"] * 3
    assert device_kind("cpu") == "cpu"
    # Lightning's own switch.
    monkeypatch.setenv("DISABLE_MPS", "1")
    assert devices.module_of_gpu() is None
    assert device_kind("auto") == "cpu"


def test_only_tensors_without_64_bits_are_copied():
    on_mps: Any = SimpleNamespace(device=torch.device("mps"), cpu=lambda: "copied")
    assert devices.with_64_bits(on_mps) == "copied"
    tensor = torch.ones(1)
    assert devices.with_64_bits(tensor) is tensor
