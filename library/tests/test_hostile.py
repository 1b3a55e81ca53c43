"""Objects that are hostile to inspection: no look at them ends a run that Lightning would train."""

import io
import threading
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset

from library.tests.kit import Net, check_same, fit, on_ranks

# Old kinds of tensors and modules say that they are old.
pytestmark = pytest.mark.filterwarnings("ignore")


class Raises:
    """Everything that Python may call by itself raises."""

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("no attributes")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def fail(self, *args: Any) -> Any:
        raise RuntimeError("not asked for")

    __eq__ = __bool__ = __len__ = __iter__ = __repr__ = __hash__ = __reduce_ex__ = fail  # type: ignore[assignment]
    __deepcopy__ = __float__ = __array__ = fail


class WithoutLength(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class WithoutItems(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no items")


class Disguised:
    """A proxy whose object is not there yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class Properties(nn.Module):
    @property
    def device(self) -> Any:
        raise RuntimeError("not on a device yet")

    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape yet")


class Table:
    """Compares like a data frame: by its elements, without a truth."""

    def __init__(self) -> None:
        self.values = np.arange(3.0)

    def __eq__(self, other: object) -> Any:
        return self.values == other

    __hash__ = None  # type: ignore[assignment]


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def hostile() -> dict[str, Any]:
    objects = np.empty(1, dtype=object)
    objects[0] = Raises()
    return {
        "raises": Raises(), "length": WithoutLength([1]), "items": WithoutItems(a=1),
        "disguised": Disguised(), "table": Table(), "lock": threading.Lock(),
        "open": io.StringIO("text"), "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(2).to_sparse(), "objects": objects,
        "records": np.zeros(2, dtype=[("a", "i4")]),
        "coded": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "lambda": lambda: 1,
    }  # fmt: skip


class Hostile(Net):
    """Trains by lazy, parametrized and scripted layers beside what nobody can read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        self.normed = parametrizations.weight_norm(nn.Linear(1, 1))
        self.scaled = nn.Linear(1, 1)
        nn.utils.parametrize.register_parametrization(self.scaled, "weight", Scaled())
        self.scripted = torch.jit.script(nn.Linear(1, 1))
        self.properties = Properties()
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.everything = hostile()
        for name, value in hostile().items():
            self.__dict__[f"own_{name}"] = value
        self.own_steps = iter(range(3))
        self.teacher = [nn.LazyLinear(2), Properties()]

    @property
    def momentum(self) -> float:
        raise RuntimeError("no momentum yet")

    def training_step(self, batch, batch_idx):
        batch, _ = batch
        loss = super().training_step(batch, batch_idx)
        next(self.own_steps, None)
        others = self.normed(batch) + self.scaled(batch) + self.scripted(batch)
        return loss + others.square().mean()

    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch, batch_idx)


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        vars(self).update(hostile())
        # What no loader process could get by pickling stays in this one.
        self.samples = torch.arange(12.0)[:, None]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.samples[index], index


class Watching(L.Callback):
    def __init__(self) -> None:
        vars(self).update(hostile())


def make_data() -> Any:
    return DataLoader(Samples(), batch_size=3, shuffle=True)


def test_no_look_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options: Any = {"callbacks": lambda: [Watching()], "logger": True}
    fit(tmp_path / "whole", Hostile, make_data, **options)
    fit(tmp_path / "parts", Hostile, make_data, [(0, 1), (1, 2)], **options)
    check_same(tmp_path / "parts", tmp_path / "whole")
    # Nothing that matters is lost.
    assert "Note: " not in capsys.readouterr().out


def train_on_ranks(run_dir: str) -> None:
    fit(Path(run_dir), Hostile, make_data, max_epochs=1)


@pytest.mark.program
def test_lazy_layers_on_two_ranks_are_one_line(tmp_path: Path):
    done = on_ranks(train_on_ranks, str(tmp_path / "run"))
    assert "rank 0, 1: body.0.weight, body.0.bias, body.1.weight has no shape" in done.stderr
    assert "call the model once with an example batch" in done.stderr
