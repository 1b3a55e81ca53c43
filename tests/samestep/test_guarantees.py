"""The guarantees of ``library/tests/guarantees.py``, of a run that the template starts."""

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from library.tests.guarantees import *  # noqa: F403
from samestep.hydra.option_keys import KEYS
from tests.conftest import NO_PICTURES, run

pytestmark = pytest.mark.program

SMALL = "library.tests.small"
WORDS = [
    "model=skeleton", f"model._target_={SMALL}.Net", "model.hidden_size=9", "model.lr=0.01",
    "data=skeleton", f"data._target_={SMALL}.Data", "data.global_batch_size=8", NO_PICTURES,
    "callbacks.checkpoints.mode=min", "report=false", "trainer.accelerator=cpu",
]  # fmt: skip


class Template:
    """Starts ``library.tests.small`` by train.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def option(self, name: str) -> str:
        return {**KEYS, "EarlyStopping.monitor": "callbacks.stop.monitor"}[name]

    def __call__(self, name: str, /, **options: Any) -> CompletedProcess[str]:
        variables = {key: value for key, value in options.items() if key.isupper()}
        arguments = {key: value for key, value in options.items() if not key.isupper()}
        words = [*WORDS, f"run_root={self.folder}/runs"]
        for key, value in ({"max_epochs": 3, "monitor": "val/loss"} | arguments).items():
            words += self.overrides(key, value)
        return run("train.py", *words, RUN_ID=name, **variables)

    def overrides(self, key: str, value: Any) -> list[str]:
        if key == "url":
            return [f"callbacks.artifacts.url={value}"]
        if key == "stop_on":
            node = "+callbacks.stop"
            target = "lightning.pytorch.callbacks.EarlyStopping"
            return [f"{node}._target_={target}", f"{node}.monitor={value}"]
        if value == "DDPStrategy":
            options = f"_target_:lightning.pytorch.strategies.{value},static_graph:false"
            return [f"trainer.strategy={{{options}}}"]
        return [f"{KEYS[key]}={value}"]


@pytest.fixture
def start(tmp_path: Path) -> Template:
    return Template(tmp_path)


@pytest.fixture
def precision() -> str:
    """Others do not depend on the front end: see the tests of the library."""
    return "32-true"
