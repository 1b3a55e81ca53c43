"""Programs that tests start: in one process, or in ranks as torchrun would start them."""

import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""Where the tests are started."""

PATIENCE_S = 1000
"""How long a test waits for what takes seconds on a quiet machine: only a fault makes it wait."""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a subprocess: this one, less what names a run or reaches a service."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RUN_ID", "WANDB", "MLFLOW"))}
    # The seed of hashes that our agent gives its ranks: the fork server can run them then.
    ours = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    ours |= variables
    # The library of the tree the tests are in, not the one that was installed.
    return kept | ours | {"PYTHONPATH": f"{ours['PYTHONPATH']}:{ROOT / 'library/src'}"}


def free_port() -> int:
    """A port for a server that is started later.

    It is none of those that the system gives to whoever connects or binds port 0, who would take it
    meanwhile, and no seed of a test repeats it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def until(
    probe: Callable[[], Any],
    seconds: float = PATIENCE_S,
    says: Callable[[], object] = str,
    pause_s: float = 0.05,
) -> Any:
    """Wait until ``probe`` returns a true value, and return that value; else fail, and say why."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, says() or f"not true after {seconds:.0f} s"
        time.sleep(pause_s)
    return found


def is_pending(pid: int, signum: int) -> bool:
    """Whether a process that runs has a signal that it has not taken yet. Linux only."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", status)
    return "zombie" not in status and any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def run(
    *command: str, cwd: Path = ROOT, timeout: float = PATIENCE_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python <command>`` as a user would, and return what it said."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd, env=environment(**variables), timeout=timeout,
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def run_ranks(
    *command: str, nodes: Sequence[int] = (2,), **options: Any
) -> subprocess.CompletedProcess[str]:
    """``run`` a program in so many ranks on each node, with the variables that torchrun sets.

    There is no agent, which spares the tests a process: the ranks that are left when one fails must
    end by themselves. Without nodes it is one process, without these variables.

    Returns:
        The exit code of the lowest rank that failed, and what the ranks said, one after the other.
    """
    places = [(node, local, num) for node, num in enumerate(nodes) for local in range(num)]
    port = free_port()

    def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
        node, local_rank, num = places[rank]
        numbers = {
            "RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "MASTER_PORT": port,
            "WORLD_SIZE": len(places), "LOCAL_WORLD_SIZE": num, "GROUP_WORLD_SIZE": len(nodes),
        }  # fmt: skip
        texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
        texts |= {name: str(number) for name, number in numbers.items()}
        return run(*command, **texts, **options)

    if not places:
        return run(*command, **options)
    with ThreadPoolExecutor(len(places)) as threads:
        done = list(threads.map(run_rank, range(len(places))))
    failed = [rank.returncode for rank in done if rank.returncode]
    said = ["".join(getattr(rank, name) for rank in done) for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(done[0].args, (failed or [0])[0], *said)


def run_code(
    code: str, *arguments: str, nodes: Sequence[int] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """``run_ranks`` of a script. Unlike ``python -c``, it starts from the fork server."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(code)
        return run_ranks(str(script), *arguments, nodes=nodes, **options)
