"""Nodes that do not share the run directory: ranks as processes here, joined by a real gloo."""

import itertools
import json
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed import FileStore

from library.tests.kit import make_spec
from library.tests.programs import PATIENCE_S
from samestep.errors import ConfigError, RunError
from samestep.plugins import replication
from samestep.ranks import collectives, meeting
from samestep.run import copies, lifecycle
from samestep.run.changes import config_digest
from samestep.run.checkpoint import (
    AtomicCheckpointIO,
    find_valid,
    load,
)
from samestep.run.files import link_file
from samestep.run.layout import LAST
from samestep.run_spec import RunSpec

NODES = (0, 1, 1, 2)  # the node of each rank
Scenario = Callable[[RunSpec], None]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def spec(tmp_path: Path, node: int) -> RunSpec:
    config = {"model": {"lr": 0.003}}
    return make_spec(run_dir_of(tmp_path, node), run_id="mine", config=config)


def be_rank(rank: int, tmp_path: Path, scenario: Scenario, spec: RunSpec) -> None:
    """Meet the other ranks, as torchrun would have started them, and play the scenario."""
    node = NODES[rank]
    variables = {"RANK": rank, "WORLD_SIZE": len(NODES), "TORCHELASTIC_RUN_ID": "test"}
    variables |= {"LOCAL_RANK": NODES[:rank].count(node), "GROUP_WORLD_SIZE": 3}
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=FileStore(f"{tmp_path}/meet", len(NODES)), rank=rank,
        world_size=len(NODES), timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    replication.BLOCK_BYTES = 1000  # several blocks a file
    scenario(spec)
    dist.destroy_process_group()


def play(tmp_path: Path, scenario: Scenario) -> None:
    """Play a scenario on all ranks; an assertion that fails on one of them fails the test."""
    (tmp_path / "meet").unlink(missing_ok=True)  # of ranks that have ended
    context = multiprocessing.get_context("fork")
    specs = [spec(tmp_path, node) for node in NODES]
    ranks = [
        context.Process(target=be_rank, args=(rank, tmp_path, scenario, own))
        for rank, own in enumerate(specs)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * len(NODES)


def save(tmp_path: Path, node: int, *steps: int, best: int | None = None) -> Path:
    """A run of that name on a node, whose last checkpoints are of these steps."""
    own = spec(tmp_path, node)
    run_dir = own.run_dir
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(own.config))
    start = {"config": config_digest(own), "started": f"on node {node}"}
    identity = {"run_id": own.run_id, "starts": [start]}
    (run_dir / "run.json").write_text(json.dumps(identity))
    for step in steps:
        content = {"global_step": step, "state_dict": {"weights": torch.full((5000,), step)}}
        content |= {"loops": {}, "callbacks": {}, "best_step": best if best in steps else None}
        AtomicCheckpointIO().save_checkpoint(content, run_dir / "checkpoints/last.ckpt")
        if step == best:
            shutil.copy(run_dir / "checkpoints/last.ckpt", run_dir / "checkpoints/best.ckpt")
    return run_dir


def step_of(path: Path) -> int:
    step: int = load(path)["global_step"]
    return step


def run_dir_of(tmp_path: Path, node: int) -> Path:
    return tmp_path / f"node-{node}/mine"


def begin(spec: RunSpec) -> None:
    """Begin, and be given a checkpoint on this node."""
    state = lifecycle.begin(spec, ["train.py"])
    assert state.ckpt_path is not None
    assert Path(state.ckpt_path).is_relative_to(spec.run_dir)
    load(Path(state.ckpt_path))


def below(spec: RunSpec, root: Path) -> RunSpec:
    """The same run of the same node, with this folder in place of ``tmp_path``."""
    return replace(spec, run_dir=run_dir_of(root, NODES[dist.get_rank()]))


def ends_all_ranks(why: str, function: Callable[..., object], *args: object) -> None:
    with pytest.raises((ConfigError, RunError), match=why):
        function(*args)


def test_each_node_gets_the_newest_intact_checkpoint_of_all_nodes(tmp_path: Path, capfd):
    """Rank zero may be on another node than before, or have lost its folder."""
    harms = ("no folder", "older", "damaged")
    for harm in harms:
        save(tmp_path / harm, 1, 20, 40, best=20)
    save(tmp_path / "older", 0, 10, best=10)
    for path in save(tmp_path / "damaged", 0, 10, best=10).glob("checkpoints/*.ckpt"):
        path.write_bytes(b"damaged")
    save(tmp_path / "one file", 0, 20, best=20)
    save(tmp_path / "newer is damaged", 0, 10)
    newer = save(tmp_path / "newer is damaged", 1, 40) / "checkpoints/last.ckpt"
    newer.write_bytes(newer.read_bytes()[:-1] + b"x")
    config_of_other = save(tmp_path / "other run", 1, 40) / "config.yaml"
    config_of_other.write_text(config_of_other.read_text().replace("lr: 0.003", "lr: 0.9"))

    def scenario(spec: RunSpec) -> None:
        for name in (*harms, "newer is damaged", "one file"):
            begin(below(spec, tmp_path / name))
        # A node that has the checkpoint gets nothing.
        again = below(spec, tmp_path / "one file")
        last = again.run_dir / "checkpoints/last.ckpt"
        before = last.stat().st_mtime_ns
        begin(again)
        assert last.stat().st_mtime_ns == before
        why = r"on the node of rank 1: .*another configuration"
        ends_all_ranks(why, lifecycle.begin, below(spec, tmp_path / "other run"), ["train.py"])
        new = below(spec, tmp_path / "new")
        assert lifecycle.begin(new, ["train.py"]).ckpt_path is None
        assert lifecycle.best_checkpoint(new) is None

    play(tmp_path, scenario)
    for harm, node in itertools.product(harms, (0, 1)):
        run_dir = run_dir_of(tmp_path / harm, node)
        assert step_of(run_dir / "checkpoints/last.ckpt") == 40
        assert step_of(run_dir / "checkpoints/best.ckpt") == 20
    there = run_dir_of(tmp_path / "no folder", 0)
    assert (there / "config.yaml").exists()  # so the node can continue the run by itself
    assert find_valid(there / "checkpoints")[0] == there / "checkpoints/last.ckpt"
    assert not list(tmp_path.rglob(".*.partial"))
    last, best = (
        run_dir_of(tmp_path / "one file", 1) / f"checkpoints/{name}.ckpt"
        for name in ("last", "best")
    )
    assert last.samefile(best)  # they are one file, and one was sent
    for node in (0, 1):
        folder = run_dir_of(tmp_path / "newer is damaged", node) / "checkpoints"
        assert step_of(folder / "last.ckpt") == 10
    assert not run_dir_of(tmp_path / "other run", 0).exists()
    assert not run_dir_of(tmp_path / "new", 1).exists()
    said = capfd.readouterr().out
    assert said.count("The newest checkpoint, of step 40, is on the node of rank 1") == 3
    assert said.count("Continuing") == 6


def test_each_node_gets_what_is_saved_while_the_run_trains(tmp_path: Path):
    def scenario(spec: RunSpec) -> None:
        assert lifecycle.begin(spec, ["train.py"]).ckpt_path is None
        for step in (10, 20, 30):
            names = ["checkpoints/last.ckpt", *["checkpoints/best.ckpt"] * (step == 20)]
            if dist.get_rank() == 0:
                last, best = (
                    spec.run_dir / f"checkpoints/{name}.ckpt" for name in ("last", "best")
                )
                content = {"global_step": step, "state_dict": {"weights": torch.zeros(5000)}}
                AtomicCheckpointIO().save_checkpoint({**content, "best_step": min(step, 20)}, last)
                if step == 20:
                    link_file(last, best)
            copies.replicate(spec.run_dir, names)

    play(tmp_path, scenario)
    here, there = (run_dir_of(tmp_path, node) / "checkpoints" for node in (0, 1))
    for name, step in ("last", 30), ("last-previous", 20), ("best", 20):
        assert step_of(there / f"{name}.ckpt") == step
        assert (there / f"{name}.ckpt").read_bytes() == (here / f"{name}.ckpt").read_bytes()
    assert (there / "best.ckpt").samefile(there / "last-previous.ckpt")  # it was sent once


def test_each_node_tests_the_best_checkpoint_of_rank_zero(tmp_path: Path):
    """Otherwise the other ranks would test their last weights, and the sum be of both."""

    def scenario(spec: RunSpec) -> None:
        begin(spec)
        if dist.get_rank() == 0:
            best = Path(spec.run_dir, "checkpoints/best.ckpt")
            content = {"global_step": 30, "state_dict": {}, "loops": {}, "callbacks": {}}
            for path in (best, best.with_name("last.ckpt")):
                AtomicCheckpointIO().save_checkpoint({**content, "best_step": 30}, path)
        path = lifecycle.best_checkpoint(spec)
        assert path is not None
        assert Path(path).is_relative_to(spec.run_dir)
        assert step_of(Path(path)) == 30

    save(tmp_path, 0, 20, best=20)
    play(tmp_path, scenario)


def flip_on_the_way() -> None:
    """Change a bit of the second block that arrives."""
    receive, blocks = collectives.receive, itertools.count()

    def flip(block: torch.Tensor, source: int) -> None:
        receive(block, source)
        if next(blocks) == 1:
            block[7] ^= 1

    collectives.receive = flip


def test_what_cannot_arrive_or_be_written_ends_all_ranks(tmp_path: Path):
    for name in ("flipped", "in the way", "full"):
        save(tmp_path / name, 0, 20)
    run_dir_of(tmp_path / "in the way", 1).parent.mkdir()
    run_dir_of(tmp_path / "in the way", 1).write_text("a file where the directory should be")

    def scenario(spec: RunSpec) -> None:
        unwritable = r"rank 1: .* cannot be written"
        in_the_way, full = (below(spec, tmp_path / name) for name in ("in the way", "full"))
        ends_all_ranks(unwritable, lifecycle.begin, in_the_way, ["train.py"])
        flip_on_the_way()
        ends_all_ranks(
            "was incomplete", lifecycle.begin, below(spec, tmp_path / "flipped"), ["train.py"]
        )
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        ends_all_ranks(unwritable, replication.replicate, full.run_dir, [LAST])

    play(tmp_path, scenario)
    assert not list(run_dir_of(tmp_path / "flipped", 1).rglob("*.ckpt*"))
    assert not list(run_dir_of(tmp_path / "flipped", 1).rglob(".*"))
    # The other node of a node whose disk is full still gets the file.
    assert not list(run_dir_of(tmp_path / "full", 1).rglob("*.ckpt*"))
    assert step_of(run_dir_of(tmp_path / "full", 2) / LAST) == 20


def test_the_preflight_finds_out_whether_the_directory_is_shared(tmp_path: Path):
    def scenario(spec: RunSpec) -> None:
        own = f"node-{NODES[dist.get_rank()]}/mine"
        for place in (tmp_path, tmp_path / "exists"):
            assert not meeting.is_shared(place / own)
            assert meeting.is_shared(place / "both/mine")

    for name in ("node-0", "node-1", "node-2", "both"):
        (tmp_path / "exists" / name / "mine").mkdir(parents=True)
    play(tmp_path, scenario)
    assert not list(tmp_path.rglob(".samestep-*"))
