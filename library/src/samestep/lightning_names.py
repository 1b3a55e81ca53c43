"""One Lightning under its two names. Imports no torch, and no Lightning until it is asked for."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The older name of each package, and the package that it is here.
SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class LightningNames(MetaPathFinder, Loader):
    """Makes ``import pytorch_lightning`` import ``lightning.pytorch``, and so all modules in it.

    ``lightning`` 2.6 depends on the distribution ``pytorch-lightning``: the same code a second
    time, with objects of its own. The Trainer of the one rejects the modules of the other, and
    treats its callbacks as strangers. Most published code has the older name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the modules below the older names, and nothing else."""
        package, dot, rest = fullname.partition(".")
        if package not in SAME:
            return None
        return ModuleSpec(fullname, self, origin=f"{SAME[package]}{dot}{rest}", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        assert spec.origin
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: Python has just replaced it by that of the alias."""
        assert module.__spec__
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let the older names mean the same from now on, before the user's code is imported."""
    if not any(isinstance(finder, LightningNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, LightningNames())
