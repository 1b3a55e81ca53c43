"""Styles that stand for a library use the library.

``make -C labs libraries`` installs those of libraries.in into an environment of their own, which
adds them to the .venv of the project: nothing else may come to depend on them. The classes are
named by their paths, so that the names of the styles can be read without the libraries.
"""

import importlib.util

from samestep.verify import known_notes
from samestep.verify.known_notes import KnownNote

from ..base import LOADER, LOST, NO_MEAN, NORMALIZES, STREAM, Exact, Regressor, Style
from ..batches import FromObjects

FORGETS = (*STREAM, *LOST)
"""Its buffer is not in its state, as its documentation says, or its shuffling counts the passes."""
MIXES = (known_notes.RANDOM_TRANSFORMS,)
"""Its collate_fn draws for a batch."""
MOVES = (known_notes.RANDOM_TRANSFERS, known_notes.RANDOM_STEPS)
"""It draws where the batch is moved."""
GROWS = (known_notes.LOST_PARTS,)
"""A MetricTracker gets a metric for each validation; not measured since these are made again."""


def of(name: str, model: type | str, data: type | str, told: tuple[KnownNote, ...] = ()) -> Style:
    """A style; text is the name of a class in models.py or loaders.py."""
    if isinstance(model, str):
        model = f"{__name__}.models.{model}"
    if isinstance(data, str):
        data = f"{__name__}.loaders.{data}"
    return Style(name, model, data, told=told)


STYLES = [
    of("litdata: StreamingDataLoader", Regressor, "LitData", STREAM),
    of("litdata: 2 workers", Regressor, "LitDataWorkers", STREAM),
    of("torchdata: StatefulDataLoader", Regressor, "TorchData", STREAM),
    of("torchdata: 2 workers", Regressor, "TorchDataWorkers", STREAM),
    of("datasets: Dataset", FromObjects, "HuggingFace", LOADER),
    of("datasets: IterableDataset, shuffled", FromObjects, "HuggingFaceStream", STREAM),
    of("datasets: a state, no buffer", FromObjects, "HuggingFaceStateful", STREAM),
    of("datasets: a state, shuffled in a buffer", FromObjects, "HuggingFaceBuffer", FORGETS),
    of("webdataset: WebLoader", Regressor, "Web", FORGETS),
    of("torch_geometric: graphs", "Graphs", "Geometric", LOADER),
    of("MONAI: CacheDataset, random transforms, Dice", "Monai", "Monai", LOADER + LOST),
    of("MONAI: 2 workers", "Monai", "MonaiWorkers", LOADER + LOST),
    of("torchvision: v2 transforms, MixUp", "Classifier", "MixedUp", LOADER + MIXES),
    of("torchvision: v2 transforms, MixUp, split_batches", "Classifier", "MixedUp", MIXES)
    ._replace(overrides=("trainer.split_batches=true",)),
    of("Transformers: BERT, its schedule", "Bert", "Tokens"),
    of("PEFT: LoRA, adapters only", "Lora", "Tokens"),
    of("timm: model, ModelEmaV3, its schedule", "Timm", "Pictures", NORMALIZES),
    of("pytorch-metric-learning: triplets, miner", "Triplets", "Pictures", NO_MEAN),
    of("pytorch-metric-learning: CrossBatchMemory", "Remembers", "Pictures", NO_MEAN),
    of("lightly: MoCo, memory bank", "MoCo", "Pictures", NO_MEAN),
    of("lightly: DINO", "Dino", "Pictures", NO_MEAN),
    of("segmentation-models-pytorch: Unet, Dice", "Segments", "Masks", NORMALIZES + NO_MEAN)
    ._replace(overrides=("trainer.strategy=ddp_find_unused_parameters_true",)),
    of("schedulefree: AdamWScheduleFree", "ScheduleFree", Exact),
    of("vector-quantize-pytorch: codebook", "Quantized", "Pictures", NO_MEAN),
    of("torch-ema: an attribute", "TorchEma", Exact),
    of("ema-pytorch: a submodule", "EmaPytorch", Exact),
    of("Kornia: augmentation after the transfer", "Augmented", "Pictures", MOVES),
    of("torchmetrics: RunningMean, MetricTracker", "Running", Exact, GROWS),
    of("lightning-hydra-template: its DataModule", "Template", "Divided", LOADER),
]  # fmt: skip


def are_installed() -> bool:
    """Whether this Python has the libraries."""
    return importlib.util.find_spec("litdata") is not None
