"""A small grid whose processes are killed at random, and one whose disk becomes full.

``python -m labs.grids`` has a large one.
"""

import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from labs.grids import __main__ as lab
from labs.servers.start import can_mount
from library.tests.programs import PATIENCE_S
from samestep.run import record
from tests.conftest import ROOT, environment, run

FULL_DISK = """
mount -t tmpfs -o size=8m tmpfs {root}
{command} > {said}/first 2>&1 &
until grep -q '"exit_code": 0' {root}/grids/full/full-seed-0.json; do sleep 0.1; done 2> {said}/wait
head -c 9m /dev/zero > {root}/filler
wait $! ; echo $? > {said}/code
{command} > {said}/second 2>&1 ; echo $? >> {said}/code
rm {root}/filler
{command} > {said}/third 2>&1 ; echo $? >> {said}/code
cp -r {root}/full-seed-* {said}
"""
"""The disk is full when the second run starts, and when the command is repeated."""


def test_a_grid_that_is_killed_is_a_loop_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lab, "SLOW", [*lab.SLOW, "+callbacks.slow.seconds=0.1"])
    kills = lab.harm(tmp_path, num_runs=2, num_kills=3, pause_s=3, dice=random.Random(0))
    assert kills.total() > 0
    for seed in range(2):
        words = [*lab.WORDS, f"seed={seed}", f"run_root={tmp_path / 'by_hand'}"]
        done = run("train.py", *words, RUN_ID=str(seed))
        assert done.returncode == 0, done.stderr
    runs = [tmp_path / f"{lab.NAME}-seed-{seed}" for seed in range(2)]
    by_hand = [tmp_path / "by_hand" / str(seed) for seed in range(2)]
    assert lab.differences(runs[0], by_hand[0]) == []
    assert lab.differences(runs[1], by_hand[1]) == []
    # The laboratory would notice.
    assert lab.differences(runs[0], by_hand[1]) == ["weights", "metrics", "history"]


@pytest.mark.skipif(not can_mount(), reason="a small disk needs the right to mount one")
def test_a_full_disk_loses_nothing_that_is_finished(tmp_path: Path):
    root, said = tmp_path / "runs", tmp_path / "said"
    root.mkdir()
    said.mkdir()
    words = [
        *lab.WORDS,
        "trainer.devices=1",
        "trainer.max_epochs=1",
        "seed=0,1",
        f"run_root={root}",
    ]
    command = shlex.join([sys.executable, "train.py", "-m", *words])
    script = FULL_DISK.format(root=root, said=said, command=command)
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script], cwd=ROOT, check=False,
        env=environment(RUN_ID="full"), capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (said / "code").read_text().split() == ["1", "1", "0"], done.stderr
    for name, num_finished in (("first", 0), ("second", 1)):
        text = (said / name).read_text()
        assert text.startswith(f"Grid full: {num_finished} of 2 runs are finished")
        assert text.count("cannot be written: No space left on device; free some space, and") == 1
        assert "Traceback" not in text
    assert "[full-seed-0]" not in (said / "second").read_text() + (said / "third").read_text()
    assert "full-seed-1: finished; 0 of 2 runs are left" in (said / "third").read_text()
    for seed in range(2):
        assert record.read(said / f"full-seed-{seed}").state == record.FINISHED
