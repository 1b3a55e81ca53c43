"""Copies of runs in real stores: folders, an S3 server on loopback, and stores that fail."""

import errno
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from library.tests.programs import PATIENCE_S, until
from library.tests.run.settings import newest
from samestep.errors import ConfigError
from samestep.plugins import shards
from samestep.ranks import environment
from samestep.run import artifacts, lifecycle, record, store
from samestep.run.artifacts import Artifacts
from samestep.run.checkpoint import AtomicCheckpointIO, load
from samestep.run.files import write_text
from samestep.run.store import RunCopy
from tests.conftest import NO_PICTURES, QUICK, final_metrics, run, run_ranks
from tests.s3_server import KEY, SECRET, s3_server, use_bucket

NODE = "++callbacks.artifacts"
NUM_EPOCHS = ["trainer.max_epochs=4", *QUICK[1:], "model=mlp", "model.net.dropout=0.2"]


class Faulty(LocalFileSystem):
    """A folder that does to each writing operation what it was told, at first in ``$FAULT``."""

    protocol = "faulty"
    fault: Callable[[str], None]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def put_file(self, source, target, **options):
        Faulty.fault(target)
        super().put_file(source, target, **options)

    def mv(self, source, target, **options):
        Faulty.fault(target)
        super().mv(source, target, **options)


class Watched(Artifacts):
    """Notes which ranks copy."""

    def setup(self, trainer, pl_module, stage) -> None:
        super().setup(trainer, pl_module, stage)
        if self._thread and self._thread.is_alive():
            (self.run_dir.parent / f"copies-{environment.rank()}").touch()


def works(path: str) -> None:
    """No fault."""


def fails(path: str) -> None:
    raise OSError(errno.EIO, f"the store is broken, says {SECRET}")


def is_full(path: str) -> None:
    Path(path).write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def hangs(path: str) -> None:
    threading.Event().wait()


def fails_then_hangs(path: str) -> None:
    Faulty.fault = staticmethod(hangs)
    fails(path)


FAULTS = {
    "": works,
    "fails_then_hangs": fails_then_hangs,
    "fails": fails,
    "is_full": is_full,
    "hangs": hangs,
}
Faulty.fault = staticmethod(FAULTS[os.environ.get("FAULT", "")])
fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture(autouse=True)
def _no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", staticmethod(works))
    monkeypatch.setattr(artifacts, "SCAN_S", 0.01)
    monkeypatch.setattr(artifacts, "MAX_DELAY_S", 0.05)
    monkeypatch.setattr(artifacts, "MIN_PAUSE_S", 0)
    monkeypatch.setattr(artifacts, "PAUSE", 0)


def save(run_dir: Path, step: int) -> None:
    """What a run writes when it saves: the history, then the best checkpoint, then the last."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_text(run_dir / "config.yaml", "seed: 0\n")
    write_text(run_dir / "run.json", '{"starts": []}\n')
    write_text(run_dir / "metrics.csv", str(step))
    for name in ("best", "last"):
        state = {"global_step": step, "name": name, "state_dict": {}, "loops": {}}
        AtomicCheckpointIO().save_checkpoint(state, run_dir / f"checkpoints/{name}.ckpt")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def copying(tmp_path: Path, timeout_s: float = PATIENCE_S) -> Artifacts:
    """A callback that has begun to copy the run ``tmp_path/mine``."""
    save(tmp_path / "mine", 1)
    url = f"faulty://{tmp_path}/store"
    callback = Artifacts(url, str(tmp_path / "mine"), timeout_s)
    callback.setup(None, None, "fit")
    return callback


def test_a_run_resumes_from_its_copy_wherever_the_upload_was_cut(tmp_path: Path):
    operations = 0

    def cut_after(number: int) -> Callable[[str], None]:
        def fault(path: str) -> None:
            nonlocal operations
            operations += 1
            if operations > number:
                raise OSError(errno.EIO, "cut")

        return fault

    for number in range(100):
        here, url = tmp_path / f"{number}/mine", f"faulty://{tmp_path}/{number}/store"
        save(here, 1)
        mirror = RunCopy(url, here)
        for name in mirror.names():
            mirror.upload(name)
        for step in range(2, 8):
            save(here, step)
        operations, Faulty.fault = 0, staticmethod(cut_after(number))
        mirror = RunCopy(url, here)  # of another process
        for name in reversed(mirror.names()):
            try:
                mirror.upload(name)
            except OSError:
                break
        Faulty.fault = staticmethod(works)

        there = tmp_path / f"{number}/elsewhere/mine"
        store.fetch(url, there)
        last, best = (load(there / f"checkpoints/{name}.ckpt") for name in ("last", "best"))
        assert last["global_step"] <= best["global_step"]  # else it would test an older one
        assert last["global_step"] <= int((there / "metrics.csv").read_text())
        assert load(newest(there / "checkpoints"))["global_step"] == best["global_step"]
        if operations <= number:
            break
    assert operations > 5
    assert last["global_step"] == 7
    here_now, there_now = contents(here), contents(there)
    del here_now["checkpoints/last-previous.ckpt"]
    assert there_now == here_now


def test_a_store_that_fails_for_a_while_gets_everything(tmp_path: Path, caplog, capsys):
    num_faults = 40

    def fault(path: str) -> None:
        nonlocal num_faults
        num_faults -= 1
        if num_faults >= 0:
            fails(path)

    Faulty.fault = staticmethod(fault)
    callback = copying(tmp_path)
    callback.flush()
    assert num_faults < 0
    assert [record.message.startswith("Cannot upload") for record in caplog.records] == [True]
    assert f"Uploaded: faulty://{tmp_path}/store/mine" in capsys.readouterr().out
    assert contents(tmp_path / "store/mine") == contents(tmp_path / "mine")


@pytest.mark.program
def test_of_a_file_that_changes_the_newest_version_is_copied(tmp_path: Path):
    callback = copying(tmp_path)
    copied = tmp_path / "store/mine/metrics.csv"
    until(lambda: copied.exists() and copied.read_text() == "1")
    save(tmp_path / "mine", 2)
    until(lambda: copied.read_text() == "2")  # while it trains
    save(tmp_path / "mine", 3)
    callback.flush()
    assert load(tmp_path / "store/mine/checkpoints/last.ckpt")["global_step"] == 3


@pytest.mark.program
def test_a_run_that_saves_all_the_time_uploads_each_file_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(artifacts, "MIN_PAUSE_S", PATIENCE_S)
    callback = copying(tmp_path)
    last = tmp_path / "store/mine/checkpoints/last.ckpt"
    until(last.exists)
    save(tmp_path / "mine", 2)
    # The next file that is new was found by a scan that has passed over the others.
    shutil.copy(tmp_path / "mine/checkpoints/best.ckpt", tmp_path / "mine/checkpoints/z.ckpt")
    until((tmp_path / "store/mine/checkpoints/z.ckpt").exists)
    assert load(last)["global_step"] == 1
    callback.flush()
    assert load(last)["global_step"] == 2


@pytest.mark.program
@pytest.mark.parametrize("fault", ["fails", "is_full", "hangs"])
def test_a_store_that_stays_broken_is_left_in_time(tmp_path: Path, fault, caplog, monkeypatch):
    monkeypatch.setenv("FAKE_SECRET", SECRET)
    Faulty.fault = staticmethod(FAULTS[fault])
    callback = copying(tmp_path, timeout_s=0.5)
    until(lambda: fault == "hangs" or caplog.records)  # it has tried
    callback.flush()
    message = caplog.records[-1].message
    assert "Not uploaded: config.yaml, run.json, metrics.csv" in message
    command = f"samestep upload {tmp_path}/mine --url faulty://{tmp_path}/store"
    assert message.endswith(command)
    assert SECRET not in caplog.text
    assert len(caplog.records) == (1 if fault == "hangs" else 2)
    assert not any(p.suffix == ".ckpt" for p in (tmp_path / "store").rglob("*"))
    Faulty.fault = staticmethod(works)  # lets the thread end


def test_a_damaged_checkpoint_does_not_replace_a_good_one(tmp_path: Path):
    save(tmp_path / "mine", 1)
    mirror = RunCopy(f"file://{tmp_path}/store", tmp_path / "mine")
    mirror.upload("checkpoints/last.ckpt")
    (tmp_path / "mine/checkpoints/last.ckpt").write_bytes(b"rot")
    with pytest.raises(ValueError, match="damaged here"):
        mirror.upload("checkpoints/last.ckpt")
    assert load(tmp_path / "store/mine/checkpoints/last.ckpt")["global_step"] == 1
    assert mirror.left() == ["checkpoints/last.ckpt"]


def test_a_password_in_the_url_is_not_shown(tmp_path: Path, caplog):
    callback = copying(tmp_path, timeout_s=0)
    callback.url = "sftp://me:hunter2@host/runs"
    Faulty.fault = staticmethod(fails)
    save(tmp_path / "mine", 2)
    callback.flush()
    assert "--url sftp://***@host/runs" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_run_that_is_not_there_and_a_store_that_cannot_be_read(tmp_path: Path, monkeypatch):
    store.fetch(f"file://{tmp_path}/store", tmp_path / "mine")
    assert contents(tmp_path / "mine") == {}
    save(tmp_path / "store/mine", 1)
    monkeypatch.setattr(Faulty, "get_file", lambda self, path, target: fails(path))
    with pytest.raises(ConfigError, match=r"cannot be read: .*url=null"):
        store.fetch(f"faulty://{tmp_path}/store", tmp_path / "mine")
    assert contents(tmp_path / "mine") == {}


def test_numbered_checkpoints_are_copied_too(tmp_path: Path):
    save(tmp_path / "mine", 1)
    state = {"global_step": 1, "state_dict": {}, "loops": {}}
    AtomicCheckpointIO().save_checkpoint(state, tmp_path / "mine/checkpoints/epoch-0002.ckpt")
    mirror = RunCopy(f"file://{tmp_path}/store", tmp_path / "mine")
    for name in mirror.names():
        mirror.upload(name)
    assert load(tmp_path / "store/mine/checkpoints/epoch-0002.ckpt")["global_step"] == 1


def test_shards_are_copied_before_their_checkpoint_and_removed_after_it(tmp_path: Path):
    run_dir, url = tmp_path / "here/mine", f"file://{tmp_path}/store"
    copy, last = RunCopy(url, run_dir), "checkpoints/last.ckpt"
    for step in (1, 2):
        save(run_dir, step)
        weights = {"w": torch.empty(3, device="meta")}
        state = {"global_step": step, "state_dict": weights, "loops": {}, "callbacks": {}}
        part = {"/state_dict/w": torch.full((3,), float(step))}
        state["sharded"] = {"/state_dict/w": 0}
        shards.save(AtomicCheckpointIO(), state, part, run_dir / last)
        for name in copy.names():
            copy.upload(name)
        (folder,) = (tmp_path / "store/mine/checkpoints").glob("shards-*")
        assert folder.name.startswith(f"shards-{step}-1-")
    store.fetch(url, tmp_path / "there/mine")
    shutil.rmtree(tmp_path / "here")
    assert load(tmp_path / "there/mine" / last)["state_dict"]["w"].tolist() == [2, 2, 2]


@pytest.mark.program
def test_a_run_whose_callbacks_have_other_names_keeps_its_best_value_and_its_copy(tmp_path: Path):
    words = [
        "train.py", "~callbacks.checkpoints", "~callbacks.artifacts", *QUICK, NO_PICTURES,
        "model=mlp",
        "+callbacks.keep={_target_:library.tests.callbacks.test_run_state.Keep,every_s:300,"
        "dirpath:${run_dir}/checkpoints,monitor:val/loss,mode:min}",
        "+callbacks.copies={_target_:samestep.run.artifacts.Artifacts,"
        f"url:{tmp_path}/store,run_dir:${{run_dir}},flush_timeout_s:30}}",
    ]  # fmt: skip
    done = run(*words, f"run_root={tmp_path}/here", RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  val/loss +\d\.\d{3,4} in epoch [12]$", done.stdout, re.MULTILINE)
    assert record.read(tmp_path / "here/mine").monitor == "val/loss"
    elsewhere = run(*words, f"run_root={tmp_path}/there", RUN_ID="mine")
    assert f"Continuing: {tmp_path}/there/mine" in elsewhere.stdout
    assert final_metrics(tmp_path / "there/mine") == final_metrics(tmp_path / "here/mine")


def test_a_newer_copy_is_fetched_by_a_run_that_went_on_elsewhere(tmp_path: Path, capsys):
    here, url = tmp_path / "mine", f"file://{tmp_path}/store"
    save(here, 2)
    save(tmp_path / "store/mine", 2)
    store.fetch(url, here)
    assert capsys.readouterr().out == ""  # it is not newer
    save(tmp_path / "store/mine", 3)
    store.fetch(url, here)
    assert load(newest(here / "checkpoints"))["global_step"] == 3
    assert load(here / "checkpoints/best.ckpt")["global_step"] == 3
    assert "has a newer checkpoint, and was fetched" in capsys.readouterr().out
    assert not list(here.rglob(".*.partial"))


def test_a_copy_replaces_checkpoints_that_are_all_damaged(tmp_path: Path):
    here, there = tmp_path / "mine", tmp_path / "store/mine"
    save(here, 3)
    save(there, 2)  # older, and better than nothing
    for path in here.glob("checkpoints/*.ckpt"):
        path.write_bytes(path.read_bytes()[:-9])
    store.fetch(f"file://{tmp_path}/store", here)
    assert load(newest(here / "checkpoints"))["global_step"] == 2


@pytest.mark.program
def test_a_copy_that_has_lost_its_configuration_is_not_overwritten(spec, tmp_path: Path):
    first = spec("model=mlp", f"run_root={tmp_path}/first")
    lifecycle.open_directory(first, [])
    state = {"global_step": 1, "state_dict": {}, "loops": {}, "callbacks": {}}
    AtomicCheckpointIO().save_checkpoint(state, Path(first.run_dir) / "checkpoints/last.ckpt")
    shutil.copytree(first.run_dir, tmp_path / "store" / Path(first.run_dir).name)
    next((tmp_path / "store").glob("*/config.yaml")).unlink()
    copies = [Artifacts(f"file://{tmp_path}/store", str(tmp_path), 1)]
    with pytest.raises(ConfigError, match=r"has lost its config\.yaml"):
        lifecycle.open_directory(spec("model=cnn", f"run_root={tmp_path}/other"), [], copies)
    begun = lifecycle.open_directory(spec("model=mlp", f"run_root={tmp_path}/here"), [], copies)
    assert begun.ckpt_path is not None


@pytest.mark.program
def test_a_rejected_run_leaves_nothing_of_what_was_fetched(spec, tmp_path: Path):
    copies = [Artifacts(f"file://{tmp_path}/store", str(tmp_path), 1)]
    first = spec("model=mlp", f"run_root={tmp_path}/first")
    lifecycle.open_directory(first, [])
    state = {"global_step": 1, "state_dict": {}, "loops": {}}
    AtomicCheckpointIO().save_checkpoint(state, Path(first.run_dir) / "checkpoints/last.ckpt")
    shutil.copytree(first.run_dir, tmp_path / "store" / Path(first.run_dir).name)
    other = spec("model=cnn", f"run_root={tmp_path}/here/runs")
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        lifecycle.open_directory(other, [], copies)
    assert not (tmp_path / "here").exists()
    # A directory that was there before is the user's.
    (tmp_path / "here/runs" / Path(other.run_dir).name).mkdir(parents=True)
    (tmp_path / "here/runs" / Path(other.run_dir).name / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        lifecycle.open_directory(other, [], copies)
    assert (tmp_path / "here/runs" / Path(other.run_dir).name / "notes.txt").exists()


def test_a_newer_copy_that_is_damaged_is_left_alone(tmp_path: Path):
    here, there = tmp_path / "mine", tmp_path / "store/mine"
    save(here, 2)
    save(there, 3)
    content = bytearray((there / "checkpoints/last.ckpt").read_bytes())
    content[99] ^= 1
    (there / "checkpoints/last.ckpt").write_bytes(content)
    store.fetch(f"file://{tmp_path}/store", here)
    assert load(newest(here / "checkpoints"))["global_step"] == 2
    assert not list(here.rglob(".*.partial"))


def test_a_newer_copy_of_another_run_is_left_alone(tmp_path: Path):
    here, there = tmp_path / "mine", tmp_path / "store/mine"
    for run_dir, config, step in ((here, "one", 1), (there, "other", 3)):
        save(run_dir, step)
        write_text(run_dir / "run.json", json.dumps({"starts": [{"config": config}]}))
    before = contents(here)
    store.fetch(f"file://{tmp_path}/store", here)
    assert contents(here) == before


def test_a_store_that_cannot_be_asked_stops_no_run_that_has_checkpoints(
    tmp_path: Path, monkeypatch, caplog
):
    save(tmp_path / "mine", 1)
    save(tmp_path / "store/mine", 3)
    before = contents(tmp_path / "mine")
    monkeypatch.setattr(Faulty, "cat_file", lambda self, path, **_: fails(path))
    store.fetch(f"faulty://{tmp_path}/store", tmp_path / "mine")
    assert "the run continues from the checkpoints that are here" in caplog.text
    assert contents(tmp_path / "mine") == before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket", r"needs pip install 'samestep\[s3\]'"),
        ("foo://x", "Protocol not known: foo"),
        ("s3://", "names no bucket or folder"),
        ("ftp://me:hunter2@127.0.0.1:1/runs", r"url=ftp://.*@127.0.0.1:1/runs: .*refused"),
        ("s3:/bucket/runs", r"such as s3://bucket/runs"),
        ("s3://me:hunter2@bucket/runs", r"url=s3://\*\*\*@bucket/runs: .*AWS_ACCESS_KEY_ID"),
        ("s3://me:hunter2/@x@bucket", r"url=s3://\*\*\*@bucket: holds credentials"),
        ("https://me:hunter2@host/runs", r"url=https://\*\*\*@host/runs: cannot be written"),
    ],
)
def test_a_store_that_cannot_work_is_rejected_before_training(url, message, monkeypatch):
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=message) as refused:
        Artifacts(url, "runs/mine", 1)
    assert "hunter2" not in str(refused.value)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://bucket`` is a server on loopback."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def bucket(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> fsspec.AbstractFileSystem:
    return use_bucket(s3, "bucket", monkeypatch)


@pytest.mark.program
def test_a_run_killed_elsewhere_ends_here_as_an_undisturbed_one(
    tmp_path: Path, s3: dict[str, str], bucket: fsspec.AbstractFileSystem
):
    recorder = ["+callbacks.recorder._target_=tests.recorder.Recorder"]
    command = ["train.py", *NUM_EPOCHS, *recorder, f"+callbacks.recorder.dirpath={tmp_path / 'w'}"]
    killed = run(*command, f"run_root={tmp_path}/lost", RUN_ID="mine", KILL_AT="50")
    assert killed.returncode == -9
    mirror = RunCopy("s3://bucket/runs", tmp_path / "lost/mine")
    for name in mirror.names():
        mirror.upload(name)
    bucket.pipe_file("bucket/runs/mine/checkpoints/../../../evil.ckpt", b"evil")

    here = tmp_path / "here/runs"
    again = [*command, f"run_root={here}", f"{NODE}._target_=samestep.run.artifacts.Artifacts"]
    again += [f"{NODE}.url=s3://bucket/runs", f"{NODE}.run_dir=${{run_dir}}"]
    again += [f"{NODE}.flush_timeout_s=30"]
    result = run(*again, RUN_ID="mine", **s3)
    assert result.returncode == 0, result.stderr
    assert "Continuing" in result.stdout
    assert result.stdout.strip().endswith("Uploaded: s3://bucket/runs/mine")
    assert result.stderr == ""
    whole = run(*command, NO_PICTURES, f"run_root={tmp_path}/whole", RUN_ID="mine")
    assert whole.returncode == 0, whole.stderr
    assert final_metrics(here / "mine") == final_metrics(tmp_path / "whole/mine")
    best = [load(root / "mine/checkpoints/best.ckpt") for root in (here, tmp_path / "whole")]
    weights = [checkpoint["state_dict"] for checkpoint in best]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])

    there = {path.removeprefix("bucket/runs/mine/"): path for path in bucket.find("bucket/runs")}
    assert {"metrics.json", "predictions/grid.csv", "checkpoints/best.ckpt"} <= set(there)
    for name, path in there.items():
        content = bucket.cat_file(path)
        assert SECRET.encode() not in content, name
        assert KEY.encode() not in content, name
        if "sha256" not in name and "evil" not in name:
            assert content == (here / "mine" / name).read_bytes(), name
    for path, content in contents(tmp_path).items():
        assert SECRET.encode() not in content, path
        assert KEY.encode() not in content, path
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.program
def test_a_store_that_fails_then_hangs_stops_no_run_and_one_rank_copies(tmp_path: Path):
    overrides = [*QUICK, NO_PICTURES, "trainer.max_epochs=1", "model=mlp", f"run_root={tmp_path}"]
    overrides += [f"{NODE}._target_=tests.samestep.run.test_artifacts.Watched"]
    overrides += [f"{NODE}.url=faulty://{tmp_path}/store", f"{NODE}.run_dir=${{run_dir}}"]
    overrides += [f"{NODE}.flush_timeout_s=2", f"{NODE}.wandb=true", "logger=wandb"]
    told = {"FAULT": "fails_then_hangs", "FAKE_SECRET": SECRET, "WANDB_MODE": "offline"}
    result = run_ranks("train.py", *overrides, RUN_ID="mine", **told)
    assert result.returncode == 0, result.stderr
    first, last = result.stderr.splitlines()
    assert re.match(r"WARNING: Cannot upload .*: OSError .*the store is broken, says \*\*\*", first)
    assert re.match(r"WARNING: Not uploaded: config.yaml, .*samestep upload ", last)
    assert json.loads((tmp_path / "mine/metrics.json").read_text())["test/accuracy"] > 0
    assert [path.name for path in tmp_path.glob("copies-*")] == ["copies-0"]
    (offline,) = tmp_path.glob("mine/wandb/offline-run-*/run-mine.wandb")
    assert b"run-mine" in offline.read_bytes()
    assert b"best.ckpt" in offline.read_bytes()
