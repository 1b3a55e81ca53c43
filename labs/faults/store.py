"""An object store beside a run, which fails in a certain way from a certain step on."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from PIL import Image

from tests.s3_server import harm, s3_server

Fault = int | Callable[[bytes], bytes] | None


def wait(seconds: float) -> None:
    time.sleep(seconds)


def change(body: bytes) -> bytes:
    """Every PNG of an answer, at its end."""
    return body.replace(b"IEND", b"IENE")


# By number, whether rows are asked for, and seconds since the fault began.
FAULTS: dict[str, Callable[[int, bool, float], Fault]] = {
    "store_503": lambda number, *_: 503 if number % 2 else None,
    "store_500": lambda number, *_: 500 if number % 2 else None,
    "store_closes": lambda number, *_: -1 if number % 2 else None,
    "store_is_slow": lambda *_: wait(0.3),
    "store_hangs": lambda number, *_: wait(9 if number % 8 == 0 else 0),
    "store_restarts": lambda _, __, seconds: 503 if seconds < 20 else None,
    "store_is_away": lambda *_: 503,
    "store_misses": lambda _, is_data, __: 404 if is_data else None,
    "store_changes": lambda _, is_data, __: change if is_data else None,
}


def begin(records: Path, fault: str) -> None:
    """Have the store fail until the end of this attempt."""
    (records / "store.fault").write_text(fault)


def write_tables(root: Path) -> None:
    """500 digits as ``examples.tables.convert`` writes them, unless they are there."""
    if root.exists():
        return
    from examples.tables.writer import find_parts, write_table
    from project.data import digits

    folder = root.with_name(f"{root.name}-files")
    found = digits(None, train=True, download=False)
    for number in range(500):
        content = io.BytesIO()
        Image.fromarray(found.data[number]).save(content, "PNG")
        name = f"{'train' if number % 5 else 'test'}/{found.targets[number]}/{number}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.getvalue())
    for part in find_parts(folder, 0.1):
        list(write_table(part, f"{root}-new/{part.name}.lance"))
    Path(f"{root}-new").rename(root)


@contextmanager
def failing_store(records: Path, root: Path) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://lab/tables`` has the tables of ``root``."""
    num_requests = 0

    def fault(method: str, path: str) -> Fault:
        nonlocal num_requests
        file = records / "store.fault"
        if not file.exists():
            return None
        num_requests += 1
        kind, seconds = file.read_text(), time.time() - file.stat().st_mtime
        if not kind:  # between its creation and its content
            return None
        return FAULTS[kind](num_requests, ".lance/data/" in path, seconds)

    with s3_server(records.with_suffix(".s3")) as server:
        fs = fsspec.filesystem(
            "s3", key=server["AWS_ACCESS_KEY_ID"], secret=server["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=server["AWS_ENDPOINT_URL"], skip_instance_cache=True,
        )  # fmt: skip
        fs.mkdir("lab")
        fs.put(str(root), "lab/tables", recursive=True)
        with harm(server, fault) as variables:
            yield variables
        (records / "store.fault").unlink(missing_ok=True)
