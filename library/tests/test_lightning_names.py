import lightning as L
import pytest
from lightning.pytorch import callbacks

import samestep  # the names below are imported after it, as in a run

assert samestep


def test_the_older_names_are_the_same_lightning():
    import lightning_fabric
    import pytorch_lightning as pl
    import pytorch_lightning.utilities.types
    from lightning_fabric.utilities import rank_zero_only
    from pytorch_lightning import seed_everything
    from pytorch_lightning.callbacks.early_stopping import EarlyStopping
    from pytorch_lightning.demos.boring_classes import BoringModel
    from pytorch_lightning.loggers import CSVLogger

    assert pl.LightningModule is L.LightningModule
    assert pl.Trainer is L.Trainer
    assert EarlyStopping is callbacks.EarlyStopping
    assert CSVLogger is L.pytorch.loggers.CSVLogger
    assert issubclass(BoringModel, L.LightningModule)
    assert seed_everything is L.seed_everything
    assert pl.__version__ == L.__version__
    assert pytorch_lightning.utilities.types is L.pytorch.utilities.types
    assert lightning_fabric is L.fabric
    assert rank_zero_only is L.fabric.utilities.rank_zero_only


def test_a_module_keeps_its_own_spec():
    """Relative imports of Lightning use it, and warn if it is of another package."""
    import pytorch_lightning as pl

    assert pl.__spec__.name == pl.__name__ == "lightning.pytorch"
    assert pl.callbacks.__spec__.name == "lightning.pytorch.callbacks"


def test_what_lightning_has_no_more_is_missing():
    with pytest.raises(ModuleNotFoundError, match=r"lightning\.pytorch\.metrics"):
        import pytorch_lightning.metrics  # noqa: F401
