"""Tables that need not fit in memory: how fast their rows come, what they hold, how they start.

MosaicML Streaming and litdata are contenders where they are installed:
pip install mosaicml-streaming litdata
"""

import io
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from labs.bench.loading import per_image

BATCH = 256
SERVERS = Path(os.environ.get("SAMESTEP_SERVERS", "~/.cache/samestep-servers")).expanduser() / "bin"
LATENCY = "20ms"  # that the S3 server adds to each request
# By pixels: images, bytes of a JPEG. Ten windows of blocks, as an epoch has many: the wait for the
# first one is a small part of a pass.
SIZES = {"32": (160_000, 1_000), "224": (40_000, 15_000)}
PICTURES = {"32": 32_768, "224": 16_384}  # by pixels; files of 1 KB and 10 KB
ROWS = {"rows-4": 10**4, "rows-8": 10**8}
LARGE, ROW_BYTES = {"1": 1_000, "10": 10_000}, 2**16  # rows: 66 MB and 655 MB


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

    lance.write_dataset(
        pa.Table.from_pylist([*contents(size)]), place / "lance", data_storage_version="2.0"
    )
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


def write_pictures(folder: Path) -> None:
    """Tables of JPEGs, as examples.tables.convert writes them; 64 pictures again and again."""
    import lance
    import pyarrow as pa

    from examples.tables.datamodule import CHECKSUM, checksum

    rng = np.random.default_rng(0)
    for size, count in PICTURES.items():
        place, rows = folder / f"images-{size}-jpeg", []
        if place.exists():
            continue
        for label in range(64):
            rough = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            smooth = np.asarray(rough.resize((int(size),) * 2, Image.Resampling.BICUBIC))
            pixels = (smooth + rng.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=75)
            image = file.getvalue()
            rows.append({"image": image, "label": label, CHECKSUM: checksum(image, label)})
        for name, times in {"train": count // 64, "val": 1, "test": 1}.items():
            table = pa.Table.from_pylist(rows * times)
            lance.write_dataset(table, place / f"{name}.lance", data_storage_version="2.0")


def installed() -> list[str]:
    """The contenders of others that can run here."""
    return [name for name in ("streaming", "litdata") if find_spec(name)]


def open_loader(place: str, name: str, cache: str = "") -> Iterable[Any]:
    """Batches of all samples in a random order; ``cache``: a folder for what is downloaded.

    ``lance`` shuffles all of them, ``blocks`` 16 MB to 61 MB of neighbours together, as the others.
    """
    if name in ("lance", "blocks"):
        from samestep.data.lance import LanceRows
        from samestep.data.loader import BatchLoader
        from samestep.data.order import Blocks

        rows = LanceRows(f"{place}/lance")
        blocks = Blocks(4096, 4) if place.endswith("-32") else Blocks(512, 8)
        return BatchLoader(rows, BATCH, shuffle=name == "lance" or blocks)
    from torch.utils.data import DataLoader

    images: Any
    if name == "streaming":
        from streaming import StreamingDataset

        where = {"remote": f"{place}/{name}"} if cache else {}
        images = StreamingDataset(
            local=cache or f"{place}/{name}", shuffle=True, batch_size=BATCH, **where
        )
    else:
        from litdata import StreamingDataset as LitDataset

        options = {}
        if cache:  # its client otherwise rejects a server without TLS
            from litdata.streaming import downloader

            downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
            options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        images = LitDataset(
            f"{place}/{name}", shuffle=True, cache_dir=cache or None, storage_options=options
        )
    return DataLoader(images, batch_size=BATCH, collate_fn=list)


def one_pass(loader: Iterable[Any]) -> int:
    """Read everything; returns the number of samples."""
    return sum(len(batch["image"] if isinstance(batch, dict) else batch) for batch in loader)


def read(folder: str, size: str, name: str) -> dict[str, float]:
    """All samples in a random order, a batch at a time, in this process: us for an image."""
    loader = open_loader(f"{folder}/images-{size}", name)
    return {"value": 1e6 * per_image(lambda: one_pass(loader), 2)["value"]}


def read_once(folder: str, size: str, name: str, where: str) -> dict[str, float]:
    """The same for the first pass in a process: ``local``, or from an S3 server that is ``far``.

    Nothing is cached on the disk before: the others keep what they download.
    """
    with place_of(folder, f"images-{size}", where) as place, TemporaryDirectory() as cache:
        loader = open_loader(place, name, cache if where == "far" else "")
        start = time.perf_counter()
        count = one_pass(loader)
        return {"value": 1e6 * (time.perf_counter() - start) / count}


def discard(folder: str, size: str) -> dict[str, float]:
    """The bytes of the table by plain requests, thrown away: what server and loopback allow."""
    import boto3
    from botocore.config import Config

    (file,) = Path(folder, f"images-{size}/lance/data").iterdir()
    length, piece = file.stat().st_size, 4 * 2**20
    with place_of(folder, f"images-{size}", "far"):
        options = Config(signature_version="s3v4", s3={"addressing_style": "path"})
        where = {"Bucket": f"images-{size}", "Key": f"lance/data/{file.name}"}
        url = boto3.client("s3", config=options).generate_presigned_url("get_object", Params=where)
        host, path = url.removeprefix("http://").split("/", 1)

        def read_pieces(first: int) -> None:
            """Every 16th piece, one after the other."""
            connection, room = HTTPConnection(host), bytearray(2**20)
            for start in range(first * piece, length, 16 * piece):
                last = min(start + piece, length) - 1
                connection.request("GET", f"/{path}", headers={"Range": f"bytes={start}-{last}"})
                answer = connection.getresponse()
                assert answer.status == 206, answer.read()
                while answer.readinto(room):
                    pass

        start = time.perf_counter()
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(read_pieces, range(16)))
        return {"value": 1e6 * (time.perf_counter() - start) / SIZES[size][0]}


def decode(folder: str, size: str, where: str) -> dict[str, float]:
    """The first pass of ``data=lance`` over JPEGs, decoded: us for an image."""
    from samestep.hydra import build
    from samestep.hydra.compose import check

    with place_of(folder, f"images-{size}-jpeg", where) as place:
        words = [
            "data=lance", f"data.root={place}", "data.num_classes=64", f"data.image_size={size}",
            "data.shuffle={_target_: samestep.data.order.Blocks, size: 256, at_once: 4}",
            f"data.global_batch_size={PICTURES[size] // 64}",
        ]  # fmt: skip
        data = build.build_datamodule(check(words))
        data.setup("fit")
        loader = data.train_dataloader()
        start = time.perf_counter()
        count = sum(len(images) for images, *_ in loader)
        return {"value": 1e6 * (time.perf_counter() - start) / count}


@contextmanager
def place_of(folder: str, name: str, where: str) -> Iterator[str]:
    """Where the data ``name`` of ``folder`` are: ``local``, or in an S3 server that is ``far``."""
    if where == "local":
        yield f"{folder}/{name}"
        return
    with far_server(folder) as variables, patch.dict(os.environ, variables):
        yield f"s3://{name}"


@contextmanager
def far_server(folder: str) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://...`` are the folders of ``folder``, some way off."""
    from library.tests.programs import until
    from tests.s3_server import KEY, SECRET, variables_of

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        ports = [one.getsockname()[1], other.getsockname()[1]]
    near, far = (f"127.0.0.1:{port}" for port in ports)
    options = ["--nometa", "--default-etag", '"etag"', folder]
    commands = [
        [SERVERS / "versitygw", "-a", KEY, "-s", SECRET, "-p", near, "--keep-alive", "--quiet",
         "posix", *options],
        [SERVERS / "slow", far, near, LATENCY],
    ]  # fmt: skip
    # They end with this process, and never run with the priority of real time that a bench may
    # have: Go's threads wait for each other in loops, and two of them would keep two processors.
    how = ["setpriv", "--pdeathsig", "KILL", "chrt", "--other", "0"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    servers = [subprocess.Popen([*how, *command], **quiet) for command in commands]
    try:
        for port in ports:
            until(lambda port=port: not socket.socket().connect_ex(("127.0.0.1", port)))
        yield variables_of(ports[1]) | {"S3_ENDPOINT_URL": f"http://{far}"}
    finally:
        for server in servers:
            server.kill()
            server.wait()


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
    """Seconds from the start of the program to the second batch of a full shuffle."""
    from samestep.data.lance import LanceRows
    from samestep.data.loader import BatchLoader

    batches = iter(BatchLoader(LanceRows(f"{folder}/{name}"), BATCH, shuffle=True, drop_last=True))
    next(batches)
    next(batches)
    return {"value": time.time() - float(os.environ["BENCH_STARTED"])}


def write_large(folder: Path) -> None:
    """The same bytes as a Lance table, a Hugging Face folder and a file of tokens; 1 and 10 x."""
    import lance
    import pyarrow as pa

    rng = np.random.default_rng(0)
    piece = pa.table({"bytes": [rng.bytes(ROW_BYTES) for _ in range(LARGE["1"])]})
    for name, count in LARGE.items():
        place = folder / f"large-{name}"
        if place.exists():
            continue
        pieces = [*piece.to_batches()] * (count // len(piece))
        lance.write_dataset(
            iter(pieces), place / "lance", schema=piece.schema, data_storage_version="2.0"
        )
        (place / "hf").mkdir()
        with pa.ipc.new_stream(place / "hf/data.arrow", piece.schema) as stream:
            for batch in pieces:
                stream.write_batch(batch)
        (place / "hf/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        with (place / "tokens").open("wb") as file:
            for batch in pieces:
                file.writelines(row.as_py() for row in batch["bytes"])


def held(folder: str, kind: str, count: str) -> dict[str, float]:
    """The most MiB that this process holds in a pass, and that the system cannot take back."""
    from examples.language.text import Windows
    from samestep.data.arrow import ArrowRows
    from samestep.data.lance import LanceRows
    from samestep.data.loader import BatchLoader

    place, tokens = f"{folder}/large-{count}/{kind}", ROW_BYTES // 2
    rows: Any
    if kind == "tokens":
        rows = Windows(np.memmap(place, "<u2", "r"), tokens, tokens, with_rest=True)
    else:
        rows = {"lance": LanceRows, "hf": ArrowRows}[kind](place)
    assert len(rows) == LARGE[count]
    status, most = Path("/proc/self/status"), 0
    for _ in BatchLoader(rows, 64, shuffle=True):
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        most = max(most, int(line.split()[1]))
    return {"value": most / 1024}
