"""Tables that need not fit in memory: how fast their rows come, what they hold, how they start.

MosaicML Streaming and litdata are contenders where they are installed:
pip install mosaicml-streaming litdata
"""

import resource
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.loading import per_image

BATCH = 256
SIZES = {"32": (8_000, 1_000), "224": (2_000, 15_000)}  # by pixels: images, bytes of a JPEG
ROWS = {"rows-4": 10**4, "rows-8": 10**8}


def contents(size: str) -> Iterator[dict[str, Any]]:
    """Random bytes, which no format can compress, as images with labels."""
    rng = np.random.default_rng(0)
    for label in range(SIZES[size][0]):
        yield {"image": rng.bytes(SIZES[size][1]), "label": label % 10}


def write_images(folder: Path, size: str) -> None:
    """The same samples in each format that is installed, unless they are there."""
    place = folder / f"images-{size}"
    if place.exists():
        return
    import lance
    import pyarrow as pa

    lance.write_dataset(pa.Table.from_pylist([*contents(size)]), place / "lance")
    try:
        import litdata
        from streaming import MDSWriter
    except ImportError:
        return
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(place / "streaming"), columns=columns) as writer:
        for sample in contents(size):
            writer.write(sample)
    litdata.optimize(
        fn=dict, inputs=[*contents(size)], output_dir=str(place / "litdata"), chunk_bytes="64MB",
        num_workers=1, verbose=False,
    )  # fmt: skip


def installed() -> list[str]:
    """The contenders of others that can run here."""
    return [name for name in ("streaming", "litdata") if find_spec(name)]


def read(folder: str, size: str, name: str) -> dict[str, float]:
    """All samples in a random order, a batch at a time, in this process: us for an image.

    ``lance`` shuffles all of them, ``blocks`` neighbours together, as the others do.
    """
    place = f"{folder}/images-{size}/{name}"
    loader: Iterable[Any]
    if name in ("lance", "blocks"):
        from samestep.data.lance import LanceRows
        from samestep.data.loader import BatchLoader
        from samestep.data.order import Blocks

        rows = LanceRows(f"{folder}/images-{size}/lance")
        loader = BatchLoader(rows, BATCH, shuffle=name == "lance" or Blocks(256))
    else:
        from torch.utils.data import DataLoader

        if name == "streaming":
            from streaming import StreamingDataset

            images = StreamingDataset(local=place, shuffle=True, batch_size=BATCH)
        else:
            from litdata import StreamingDataset as LitDataset

            images = LitDataset(place, shuffle=True)
        loader = DataLoader(images, batch_size=BATCH, collate_fn=list)

    def one_pass() -> int:
        return sum(len(batch["image"] if isinstance(batch, dict) else batch) for batch in loader)

    return {"value": 1e6 * per_image(one_pass)["value"]}


def write_rows(folder: Path) -> None:
    """Tables of one column, of which Lance keeps only a few bytes."""
    import lance
    import pyarrow as pa

    for name, num_rows in ROWS.items():
        if not (folder / name).exists():
            piece = pa.table({"x": np.zeros(10**4, np.float32)})
            pieces = (batch for _ in range(num_rows // 10**4) for batch in piece.to_batches())
            lance.write_dataset(pieces, folder / name, schema=piece.schema)


def start(folder: str, name: str) -> dict[str, float]:
    """Seconds from the open to the second batch of a full shuffle."""
    from samestep.data.lance import LanceRows
    from samestep.data.loader import BatchLoader

    begin = time.perf_counter()
    batches = iter(BatchLoader(LanceRows(f"{folder}/{name}"), BATCH, shuffle=True, drop_last=True))
    next(batches)
    next(batches)
    return {"value": time.perf_counter() - begin}


def resident(folder: str, share: str) -> dict[str, float]:
    """The largest memory of this process in MiB, after a pass over a share of the images."""
    from samestep.data.lance import LanceRows
    from samestep.data.loader import BatchLoader

    rows = LanceRows(f"{folder}/images-224/lance")
    rows.num_rows = round(len(rows) * float(share))
    for _ in BatchLoader(rows, BATCH, shuffle=True):
        pass
    return {"value": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
