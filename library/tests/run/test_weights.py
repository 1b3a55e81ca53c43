"""Modules that save a part of their weights, or load them in their own way."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics import MeanMetric

from library.tests.kit import Net, batches, check_exact, fit, weights
from samestep.errors import ConfigError
from samestep.run import weights as loading


class Adapter(Net):
    """Trains its head, and takes the body from a file of pretrained weights, so to say."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.Adam(module.head.parameters(), 0.01))
        self.body.requires_grad_(False)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


class DropsInHook(Adapter):
    def on_save_checkpoint(self, checkpoint):
        kept = {k: v for k, v in checkpoint["state_dict"].items() if "body" not in k}
        checkpoint["state_dict"] = kept


class LoadsLoosely(DropsInHook):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class SaysSo(DropsInHook):
    strict_loading = False


class Restores(DropsInHook):
    num_loads = 0

    def on_load_checkpoint(self, checkpoint):
        self.num_loads += 1
        for name, value in self.state_dict().items():
            checkpoint["state_dict"].setdefault(name, value)


class SavesAdapterOnly(Adapter):
    """As libraries of adapters do it."""

    def state_dict(self, *args, **options):
        found = super().state_dict(*args, **options)
        return {name: value for name, value in found.items() if "body" not in name}


class SavesAdapterLoosely(SavesAdapterOnly):
    strict_loading = False


@pytest.mark.parametrize("kind", [LoadsLoosely, SaysSo, Restores, SavesAdapterLoosely])
def test_a_run_of_adapters_continues_and_is_tested(tmp_path: Path, kind: Any):
    whole, parts = check_exact(tmp_path, kind, batches, (0, 1), (1, 2), monitor="val_loss")
    assert weights(tmp_path / "parts").keys() == {"head.weight", "head.bias"}
    for part in whole, parts[-1]:
        result = part.trainer.test(part.module, batches(shuffle=False), verbose=False)
        assert result[0]["test_loss"] > 0
    # Nothing is loaded by the first start.
    assert getattr(whole.module, "num_loads", 0) == (kind is Restores)


class Drops(L.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["state_dict"] = {}


@pytest.mark.parametrize("kind", [DropsInHook, SavesAdapterOnly, Net])
def test_weights_that_could_not_be_loaded_are_found_before_the_first_step(
    tmp_path: Path, kind: Any
):
    steps: list[int] = []

    class Counts(kind):  # type: ignore[misc]
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    message = r"it has no (body|head).weight\. .*self.strict_loading = False in Counts.__init__"
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path / "run", Counts, callbacks=lambda: [Drops()] if kind is Net else [])
    assert steps == []
    assert list(tmp_path.iterdir()) == []


class Renamed(torch.nn.Linear):
    """A layer that saves other names, and knows them."""

    def __init__(self) -> None:
        super().__init__(1, 4)

    def _save_to_state_dict(self, found, prefix, keeps_graph):
        super()._save_to_state_dict(found, prefix, keeps_graph)
        found[f"{prefix}matrix"] = found.pop(f"{prefix}weight")

    def _load_from_state_dict(self, weights, prefix, *args):
        weights[f"{prefix}weight"] = weights.pop(f"{prefix}matrix")
        super()._load_from_state_dict(weights, prefix, *args)


class Hooked(torch.nn.Linear):
    """The same, by hooks."""

    def __init__(self) -> None:
        super().__init__(1, 4)
        self._register_state_dict_hook(rename)
        self.register_load_state_dict_pre_hook(name_again)


def rename(module, found, prefix, metadata):
    found[f"{prefix}matrix"] = found.pop(f"{prefix}weight")


def name_again(module, found, prefix, *args):
    found[f"{prefix}weight"] = found.pop(f"{prefix}matrix")


class Extra(torch.nn.Linear):
    """A layer that saves more than tensors."""

    def __init__(self) -> None:
        super().__init__(1, 4)

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        assert state == 1


@pytest.mark.parametrize("kind", [Renamed, Hooked, Extra])
def test_what_a_part_loads_in_its_own_way_is_no_misfit(tmp_path: Path, kind: Any):
    class Uses(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = kind()
            self.metric = MeanMetric()
            self.metric.persistent(True)

    check_exact(tmp_path, Uses, batches, (0, 1))


def test_a_checkpoint_of_another_model_is_one_message(tmp_path: Path):
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(1, 5), torch.nn.Linear(5, 1)

    class Longer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tail = torch.nn.Linear(1, 1)

    class Shorter(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.head

    fit(tmp_path, max_epochs=1)
    options = {"max_epochs": 2, "allow_changes": ["model.class"]}
    for kind, why in (
        (Wider, r"body.weight has the shape \[4, 1\] instead of \[5, 1\]"),
        (Longer, "it has no tail.weight"),
        (Shorter, "the model has no head.bias"),
    ):
        with pytest.raises(ConfigError, match=rf"last.ckpt does not fit this model: {why}. Use"):
            fit(tmp_path, kind, **options)


class Grows(Net):
    """Has a bank of samples, from its second epoch on also a wider body and one more buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0, 1))
        self.register_buffer("scale", None)

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch) + self.head.bias.square().sum() * self.bank.sum()
        return loss if self.scale is None else loss * self.scale

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.bank = torch.cat([self.bank, batch[0][:1]])

    def on_train_epoch_start(self):
        if self.current_epoch != 1:
            return
        self.scale = torch.tensor(0.5)
        (optimizer,) = self.trainer.optimizers
        optimizer.state.clear()
        for layer, name, dim in (
            (self.body, "weight", 0), (self.body, "bias", 0), (self.head, "weight", 1),
        ):  # fmt: skip
            old = getattr(layer, name).detach()
            setattr(layer, name, torch.nn.Parameter(torch.cat([old, old], dim)))
        optimizer.param_groups[0]["params"] = [*self.parameters()]


def test_tensors_that_grow_are_restored(tmp_path: Path, capsys):
    places: list[Any] = [(0, 1), (1, 0), (1, 2)]
    _, parts = check_exact(tmp_path, Grows, batches, *places)
    assert parts[-1].module.body.weight.shape == (8, 1)
    check_exact(tmp_path / "killed", Grows, batches, *places, how="SIGKILL", save_every_s=1e-9)
    assert "since training began" not in capsys.readouterr().out


def test_a_buffer_that_is_not_saved_and_tied_weights_are_no_misfit():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    module.register_buffer("kept", torch.ones(1))
    module[0].register_buffer("lost", torch.ones(1), persistent=False)
    assert loading.find_misfit(module.state_dict(), module) is None
    assert loading.find_misfit(torch.nn.LazyLinear(2).state_dict(), torch.nn.LazyLinear(2)) is None
