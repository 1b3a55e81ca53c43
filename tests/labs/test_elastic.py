"""Nodes that leave and join while a run goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from labs.faults.lab import BASE
from library.tests import etcd_server
from library.tests.etcd_server import EtcdServer
from library.tests.kit import check_same
from library.tests.programs import PATIENCE_S, run_code, until
from tests.conftest import ROOT, environment, final_metrics, free_port

pytestmark = pytest.mark.program

ENTRYPOINT = [sys.executable, "-m", "samestep.launch.entrypoint"]


def test_nodes_leave_and_join(tmp_path: Path):
    """One is lost, another joins and is stopped. By etcd: tests/samestep/node."""
    records, enough = tmp_path / "records", tmp_path / "enough"
    endpoint = f"127.0.0.1:{free_port()}"
    command = [
        *ENTRYPOINT, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
        # A machine that stands still for 20 s loses no node: torch would leave two groups.
        "--rdzv-conf=last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=7",
        # It ends when it is told: nobody knows how long a node takes to come or to be missed.
        *BASE, "trainer.max_epochs=10000", "model.lr_scheduler.pct_start=0.0", "report=false",
        f"run_root={tmp_path}",
        "callbacks.checkpoints.every_s=1",
        "+callbacks.recorder._target_=labs.faults.saboteur.Saboteur",
        f"+callbacks.recorder.dirpath={records}", "+callbacks.recorder.faults=[]",
        "+callbacks.slow._target_=labs.faults.saboteur.SlowToTheEnd",
        "+callbacks.slow.seconds=0.5",
        f"+callbacks.slow.path={enough}",
    ]  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        variables = environment(RUN_ID="elastic", TERMINATION_LOG=f"{tmp_path}/message")
        with (tmp_path / f"agent-{len(processes)}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
                )
            )

    def sizes() -> list[int]:
        """World size of each step so far, as rank zero's share of the images says."""
        path = records / "rank-0.jsonl"
        written = path.read_text() if path.exists() else ""
        lines = written.rpartition("\n")[0].splitlines()  # the last line may be half written
        return [60 // len(json.loads(line)["ids"]) for line in lines]

    def wait_for(world_size: int, after: int) -> int:
        def is_seen() -> bool:
            assert any(process.poll() is None for process in processes), said()
            return sizes()[after + 4 :].count(world_size) >= 5

        until(is_seen, says=lambda: (sizes(), said()))
        return len(sizes())

    def said() -> str:
        return "\n".join(path.read_text()[-3000:] for path in tmp_path.glob("agent-*.log"))

    try:
        start()
        wait_for(1, after=0)  # so the first one has the store
        start()
        steps = wait_for(2, after=0)
        os.killpg(processes[1].pid, signal.SIGKILL)  # the node is gone, without a word
        steps = wait_for(1, after=steps)
        start()
        wait_for(2, after=steps)
        processes[2].send_signal(signal.SIGTERM)
        assert processes[2].wait(PATIENCE_S) == 143, said()
        enough.touch()
        assert processes[0].wait(PATIENCE_S) == 0, said()
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert f"meets at {endpoint} (127.0.0.1" in said()
    assert final_metrics(tmp_path / "elastic")["test/accuracy"] > 0.5
    batches: dict[tuple[int, int, float], list[list[int]]] = {}
    for rank in (0, 1):
        for line in map(json.loads, (records / f"rank-{rank}.jsonl").read_text().splitlines()):
            batches.setdefault((line["epoch"], line["batch"], line["world_size"]), []).append(
                line["ids"]
            )
    seen: dict[tuple[int, int], list[int]] = {}
    for (epoch, batch, world_size), parts in batches.items():
        if world_size == 1:
            seen.setdefault((epoch, batch), parts[0])
            assert all(part == seen[epoch, batch] for part in parts)
    epochs = {epoch for epoch, _, _ in batches}
    assert epochs == set(range(len(epochs)))
    for epoch in epochs:  # each image once in each epoch, whoever was there
        ids: list[int] = []
        for batch in range(20):
            parts = {tuple(p) for size in (1, 2) for p in batches.get((epoch, batch, size), [])}
            ids += {id for part in parts for id in part}
        assert len(ids) == len(set(ids)) == 1200


SLOW = """
import sys, time
from pathlib import Path
import lightning as L
from library.tests.kit import batches
from library.tests.ranks.test_virtual import Everything
from samestep import Trainer

class Slow(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if not Path(sys.argv[1] + ".enough").exists():
            time.sleep(float(sys.argv[2]))
        if trainer.is_global_zero:
            with open(sys.argv[1] + ".sizes", "a") as file:
                file.write(str(trainer.world_size))

trainer = Trainer(
    run_dir=sys.argv[1], virtual_ranks=4, max_epochs=10, accelerator="cpu", logger=False,
    callbacks=[Slow()], save_every_s=1, mode="min", enable_progress_bar=False,
)
trainer.fit(Everything(), batches(192, 12), batches(shuffle=False))
"""


def test_the_bits_stay_while_nodes_leave_and_join(tmp_path: Path):
    """With virtual ranks: a node joins, is lost, and another one joins."""
    script = tmp_path / "script.py"
    script.write_text(SLOW)
    samestep = [sys.executable, "-m", "samestep", "run"]
    command = [
        *samestep, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-conf=last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=7",
        str(script), str(tmp_path / "elastic"), "1",
    ]  # fmt: skip
    variables = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    processes: list[subprocess.Popen[bytes]] = []
    sizes = tmp_path / "elastic.sizes"

    def start() -> None:
        with (tmp_path / f"agent-{len(processes)}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
                )
            )

    def wait_for(size: str, after: int) -> int:
        def read() -> str:
            return sizes.read_text() if sizes.exists() else ""

        until(lambda: read()[after:].count(size) >= 2 or processes[0].poll() is not None)
        assert read()[after:].count(size) >= 2, (tmp_path / "agent-0.log").read_text()[-3000:]
        return len(read())

    try:
        start()
        steps = wait_for("1", 0)
        start()
        steps = wait_for("2", steps)
        os.killpg(processes[1].pid, signal.SIGKILL)
        steps = wait_for("1", steps)
        start()
        wait_for("2", steps)
        (tmp_path / "elastic.enough").touch()
        assert processes[0].wait(PATIENCE_S) == 0
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    done = run_code(SLOW, str(tmp_path / "whole"), "0")
    assert done.returncode == 0, done.stderr
    check_same(tmp_path / "elastic", tmp_path / "whole")


class Pod:
    """A container that is made again when it ends, with the same ``RUN_ID``, until it succeeds."""

    def __init__(self, directory: Path, command: list[str]) -> None:
        self.directory = directory
        self.command = command
        self.ended: list[tuple[int, str]] = []  # exit code and cause of each container
        self.process: subprocess.Popen[bytes] | None = None
        self.is_deleted = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.is_deleted and (not self.ended or self.ended[-1][0]):
            message = self.directory / f"message-{len(self.ended)}"
            with (self.directory / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=environment(RUN_ID="mine", TERMINATION_LOG=str(message)),
                )  # fmt: skip
            code = self.process.wait()
            self.ended.append((code, message.read_text() if message.exists() else ""))

    def delete(self) -> None:
        self.is_deleted = True
        while self.thread.is_alive():
            if self.process:
                self.process.kill()  # its child ends with it
            self.thread.join(0.1)


def test_a_node_that_gave_up_waiting_for_etcd_runs_again_when_it_is_made_again(tmp_path: Path):
    if why := etcd_server.why_not():
        pytest.skip(why)
    server = EtcdServer(tmp_path)
    command = [
        *ENTRYPOINT, "--nnodes=1", "--nproc-per-node=1",
        "--rdzv-backend=etcd-v2", f"--rdzv-endpoint={server.address}", "--max-restarts=9",
        "--rdzv-conf=timeout=5,last_call_timeout=1",
        *BASE, "trainer.max_epochs=1", "report=false", f"run_root={tmp_path}",
        "+callbacks.recorder._target_=labs.faults.saboteur.Saboteur",
        f"+callbacks.recorder.dirpath={tmp_path}",
        # While etcd is away the rank is killed, so the node must meet again.
        "+callbacks.recorder.faults=[lose_etcd_until_told step 7 0,kill step 9 0]",
    ]  # fmt: skip

    def gave_up(cause: str) -> bool:
        return any(cause in why for _, why in pod.ended)

    with server.running():
        pod = Pod(tmp_path, command)
        try:
            until(lambda: gave_up("the rendezvous failed (no etcd for 5 s: "))
            until(lambda: gave_up("does not answer after 5 s"))
            server.bring_back()
            pod.thread.join(PATIENCE_S)
        finally:
            pod.delete()
    assert pod.ended[-1] == (0, ""), pod.ended
    assert {code for code, _ in pod.ended[:-1]} == {1}
    assert len(pod.ended) < 10
    assert final_metrics(tmp_path / "mine")["test/accuracy"] > 0.2
