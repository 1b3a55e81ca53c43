"""Small programs of libraries on top of Lightning: ``python -m library.tests.on_top NAME RUN_DIR``.

Each function is what a user of the library writes, with small data that are made up. ``HARM`` names
a signal and the step after which the program sends it to itself, such as ``SIGTERM:8``.
"""

import hashlib
import os
import signal
import sys
from typing import Any

# First, as some of them import pytorch_lightning.
import samestep  # isort: skip

import lightning as L
import numpy as np
import torch

CPU: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}


class Harm(L.Callback):
    """Sends a signal to this process."""

    def on_train_batch_end(self, trainer, *args):
        name, _, step = os.environ.get("HARM", "").partition(":")
        if name and trainer.global_step == int(step):
            os.kill(os.getpid(), signal.Signals[name])


def waves(num: int, shift: float = 0.0) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(num)
    return np.sin(np.arange(num) / 6 + shift) + 0.1 * noise + 2


def neuralforecast(run_dir: str) -> Any:
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    days = pd.date_range("2020-01-01", periods=120)
    series = [pd.DataFrame({"unique_id": str(i), "ds": days, "y": waves(120, i)}) for i in range(8)]
    options = {"val_check_steps": 4, "batch_size": 4, "windows_batch_size": 16, "random_seed": 1}
    model = NHITS(12, 24, max_steps=10, mlp_units=3 * [[16, 16]], **options, **CPU)
    with samestep.patch_lightning(run_dir=run_dir, callbacks=[Harm()]):
        forecast = NeuralForecast(models=[model], freq="D")
        forecast.fit(df=pd.concat(series), val_size=12)
        return forecast.models[0], forecast.predict()["NHITS"].sum()


def darts(run_dir: str) -> Any:
    from darts import TimeSeries
    from darts.models import NBEATSModel
    from torchmetrics import MeanAbsoluteError

    series = TimeSeries.from_values(waves(80).astype(np.float32))
    sizes = {"num_stacks": 2, "num_layers": 1, "layer_widths": 8, "batch_size": 16}
    model = NBEATSModel(
        12, 4, n_epochs=4, random_state=1, dropout=0.1, torch_metrics=MeanAbsoluteError(),
        pl_trainer_kwargs=CPU, **sizes,
    )  # fmt: skip
    with samestep.patch_lightning(run_dir=run_dir, callbacks=[Harm()]):
        model.fit(series[:60], val_series=series[40:])
        return model.model, model.predict(4).values().sum()


def pytorch_forecasting(run_dir: str) -> Any:
    import pandas as pd
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.data import GroupNormalizer

    steps = np.arange(40)
    groups = [pd.DataFrame({"g": str(i), "t": steps, "y": waves(40, i)}) for i in range(4)]
    table = pd.concat(groups, ignore_index=True)
    data = TimeSeriesDataSet(
        table[table.t < 36], time_idx="t", target="y", group_ids=["g"], max_encoder_length=12,
        max_prediction_length=4, static_categoricals=["g"], time_varying_known_reals=["t"],
        time_varying_unknown_reals=["y"], target_normalizer=GroupNormalizer(groups=["g"]),
    )  # fmt: skip
    later = TimeSeriesDataSet.from_dataset(data, table, predict=True, stop_randomization=True)
    loaders = data.to_dataloader(train=True, batch_size=16), later.to_dataloader(batch_size=16)
    model = TemporalFusionTransformer.from_dataset(
        data, learning_rate=0.03, hidden_size=4, attention_head_size=1, dropout=0.1,
        hidden_continuous_size=4, loss=QuantileLoss(), optimizer="adam",
    )  # fmt: skip
    with samestep.patch_lightning(run_dir=run_dir, callbacks=[Harm()]):
        trainer = L.Trainer(max_epochs=3, gradient_clip_val=0.1, default_root_dir="logs", **CPU)
        trainer.fit(model, *loaders)
        return model, model.predict(loaders[1], trainer_kwargs=CPU).sum()


def scvi(run_dir: str) -> Any:
    import scvi

    scvi.settings.seed = 0
    data = scvi.data.synthetic_iid(batch_size=64)
    scvi.model.SCVI.setup_anndata(data, batch_key="batch")
    model = scvi.model.SCVI(data, n_hidden=16)
    with samestep.patch_lightning(run_dir=run_dir, callbacks=[Harm()]):
        model.train(max_epochs=2, accelerator="cpu", batch_size=32, check_val_every_n_epoch=1)
    return model.module, model.get_latent_representation().sum()


def pytorch_tabular(run_dir: str) -> Any:
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    table = pd.DataFrame({"a": waves(96), "b": waves(96, 1), "c": list("xyz") * 32})
    table["t"] = (table.a > table.b).astype(int)
    model = TabularModel(
        data_config=DataConfig(
            target=["t"], continuous_cols=["a", "b"], categorical_cols=["c"]
        ),
        model_config=CategoryEmbeddingModelConfig(
            task="classification", layers="8-8", dropout=0.1
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=16, max_epochs=4, accelerator="cpu", progress_bar="none",
            load_best=False, checkpoints=None, early_stopping=None,
        ),
        verbose=False,
    )  # fmt: skip
    with samestep.patch_lightning(run_dir=run_dir, callbacks=[Harm()]):
        model.fit(train=table[:64], validation=table[64:])
        (result,) = model.evaluate(table[64:], verbose=False)
    return model.model, result["test_loss"]


PROGRAMS = {
    "neuralforecast": (neuralforecast, 5, 8),
    "darts": (darts, 5, 10),
    "pytorch_forecasting": (pytorch_forecasting, 3, 5),
    "scvi": (scvi, 5, 8),
    "pytorch_tabular": (pytorch_tabular, 6, 10),
}
"""A program by the package that it needs, and the steps after which it is killed and stopped."""


def digest_of(module: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, torch.Tensor):
            found.update(name.encode())
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    _, name, run_dir = sys.argv
    # Most of them make their model before a Trainer has seeded anything.
    L.seed_everything(1)
    program, *_ = PROGRAMS[name]
    module, result = program(run_dir)
    print(f"result: {digest_of(module)} {float(result)!r}")
