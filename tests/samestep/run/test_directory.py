import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml

import project
from samestep.errors import ConfigError
from samestep.run import directory as run
from samestep.run import lock, state
from samestep.run.changes import find_changes, read_config
from samestep.run.checkpoint import AtomicCheckpointIO, CheckpointError
from samestep.run.records import read_history
from samestep.run.summary import command_to_go_on, count_epochs, count_steps, summarize
from samestep.spec import RunSpec, select
from tests.conftest import environment


def test_the_saved_configuration_is_resolved_and_the_same_again(spec, tmp_path: Path):
    cfg = spec("model=mlp")
    run.begin(cfg, ["train.py", "model=mlp"])
    saved = yaml.safe_load((tmp_path / "test/config.yaml").read_text())
    assert saved["run_dir"] == f"{tmp_path}/test"
    assert saved["model"]["num_classes"] == 10
    run.begin(cfg, ["train.py", "model=mlp"])
    assert find_changes(cfg) == {}
    attempts = json.loads((tmp_path / "test/logs/environment.json").read_text())
    assert [attempt["command"] for attempt in attempts] == [["train.py", "model=mlp"]] * 2


def test_secrets_stay_out_of_the_saved_configuration(
    spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_API_KEY", "sesame-open-123")
    overrides = ["data.mirror=http://me:hidden456@host/sesame-open-123"]
    run.begin(spec(*overrides), ["train.py", *overrides])
    for path in (tmp_path / "test").rglob("*.*"):
        assert "sesame-open-123" not in path.read_text(), path
        assert "hidden456" not in path.read_text(), path
    assert find_changes(spec(*overrides)) == {}


def begin_and_save(cfg: RunSpec) -> None:
    """Begin a run, and save a checkpoint: without one it would not be a run yet."""
    run.begin(cfg, [])
    save(cfg.run_dir / "checkpoints/last.ckpt", 1)


def test_a_run_may_go_on_longer_on_other_devices(spec):
    begin_and_save(spec("trainer.max_epochs=2"))
    changes = find_changes(spec("trainer.max_epochs=4", "trainer.devices=2", "logger=wandb"))
    assert {key: changes[key] for key in changes if not key.startswith("logger.")} == {
        "trainer.devices": (1, 2),
        "trainer.max_epochs": (2, 4),
    }
    assert changes["logger.wandb._target_"] == ("absent", "samestep.callbacks.loggers.wandb")


def test_a_run_may_not_become_another_one(spec):
    begin_and_save(spec())
    with pytest.raises(ConfigError, match="RUN_ID") as error:
        find_changes(spec("seed=7", "model=mlp", "trainer.max_epochs=4"))
    message = str(error.value)
    assert "\n  seed: 0 -> 7\n" in message
    assert "\n  model.net.hidden_size: absent -> 85\n" in message
    assert "max_epochs" not in message


@pytest.mark.parametrize("leaves", ["nothing", "results"])
def test_what_never_made_a_step_is_no_run_yet(spec, tmp_path: Path, leaves: str):
    run.begin(spec(), [])  # it failed before its first checkpoint
    if leaves == "results":
        run.finish(spec(), {"a": 1.0})
        with pytest.raises(ConfigError, match="seed: 0 -> 7"):
            run.begin(spec("seed=7"), [])
        return
    assert run.begin(spec("seed=7"), []) == (False, None)
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text())["seed"] == 7


def test_a_fast_dev_run_leaves_the_name_free(spec, tmp_path: Path):
    fast = spec("debug=fast")
    for _ in range(2):  # it is done again, and not finished before
        assert run.begin(fast, []) == (False, None)
        run.finish(fast, {"a": 1.0})
    assert not (tmp_path / "test/metrics.json").exists()
    assert run.begin(spec("seed=7"), []) == (False, None)


@pytest.mark.parametrize("other_seed", [0, 7])
def test_what_was_seen_before_the_lock_is_looked_at_again(
    spec, tmp_path: Path, monkeypatch, other_seed: int
):
    acquire = lock.acquire

    def lock_late(run_dir: Path) -> None:
        """Another process was faster: it has begun and finished a run of the same name."""
        monkeypatch.setattr(lock, "acquire", acquire)
        other = spec(f"seed={other_seed}")
        begin_and_save(other)
        run.finish(other, {"a": 1.0})
        acquire(run_dir)

    monkeypatch.setattr(lock, "acquire", lock_late)
    if other_seed == 0:
        assert run.begin(spec(), []).finished
        return
    with pytest.raises(ConfigError, match="seed: 7 -> 0"):
        run.begin(spec(), [])
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text())["seed"] == 7
    assert (tmp_path / "test/metrics.json").exists()


def test_a_run_takes_the_changes_it_is_told_to(spec):
    begin_and_save(spec())
    changes = ["seed=7", "model.optimizer.lr=0.5"]
    seeds = "seed,data.seed,model.seed"
    allowed = spec(*changes, f"allow_changes=[model.optimizer.lr,{seeds}]")
    assert find_changes(allowed)["model.optimizer.lr"] == (0.003, 0.5)
    with pytest.raises(ConfigError, match=r"allow_changes=\[model.optimizer.lr\]") as error:
        find_changes(spec(*changes, f"allow_changes=[{seeds}]"))
    assert "seed: 0" not in str(error.value)


def test_two_processes_do_not_share_a_run_directory(spec, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lock, "TIMEOUT_S", 1)
    program = (
        "import sys, time; from pathlib import Path; from samestep.run import lock\n"
        "lock.acquire(Path(sys.argv[1])); print('claimed', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "test")]
    owner = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=f"in use by process {owner.pid} on .*RUN_ID"):
            run.begin(spec(), [])
    finally:
        owner.kill()
        owner.communicate()
    assert not run.begin(spec(), []).finished  # a dead owner's claim is taken over


@pytest.mark.parametrize("comes_third", [True, False])
def test_a_lock_without_a_name_is_no_lock(tmp_path: Path, monkeypatch, comes_third: bool):
    flock = lock.fcntl.flock
    run_dir = tmp_path / "mine"

    def flock_late(file: int, operation: int) -> None:
        """The owner has removed the directory meanwhile, and a third process may have begun."""
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        shutil.rmtree(run_dir)
        if comes_third:
            lock.acquire(run_dir)
            lock.forget(run_dir)  # as if another process held it
        flock(file, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock_late)
    monkeypatch.setattr(lock.time, "sleep", lambda _: None)
    if comes_third:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on .* since"):
            lock.acquire(run_dir)
    else:
        lock.acquire(run_dir)
        assert lock.is_held(run_dir)


def test_a_directory_of_two_names_is_locked_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lock, "TIMEOUT_S", 1)
    (tmp_path / "link").symlink_to("mine")
    lock.acquire(tmp_path / "mine")
    lock.acquire(tmp_path / "link")


def test_a_longer_time_is_asked_of_a_finished_run(spec):
    cfg = spec("trainer.max_time='9:00:00:00'")
    run.begin(cfg, [])
    run.finish(cfg, {})
    for max_time, is_finished in (
        ("8:23:59:99", False),
        ("8:23:59:59", True),
        ("10:00:00:00", False),
    ):
        start = run.begin(spec(f"trainer.max_time='{max_time}'"), [])
        assert start.finished is is_finished, max_time
        if not is_finished:
            run.finish(cfg, {})


def test_a_run_is_finished_until_more_is_asked_of_it(spec):
    cfg = spec("trainer.max_epochs=2")
    for override, finished in {
        "trainer.max_epochs=2": True,
        "trainer.max_epochs=3": False,
        "trainer.max_epochs=1": True,
        "trainer.max_steps=10": True,  # there was no limit before
        "trainer.devices=2": True,
    }.items():
        run.begin(cfg, [])
        run.finish(cfg, {})
        assert run.begin(spec("trainer.max_epochs=2", override), []).finished is finished
    cfg = spec("trainer.max_epochs=5")
    assert not run.begin(cfg, []).finished
    assert not run.begin(cfg, []).finished  # killed before it came to its end


def test_a_run_that_begins_again_has_no_rows_of_before(spec, tmp_path: Path):
    run.begin(spec(), [])
    (tmp_path / "test/metrics.csv").write_text("epoch,step\n")
    last = tmp_path / "test/checkpoints/last.ckpt"
    save(last, 1)
    assert run.begin(spec(), []).ckpt_path == f"{tmp_path}/test/checkpoints/last.ckpt"
    assert (tmp_path / "test/metrics.csv").exists()
    last.unlink()
    assert run.begin(spec(), []).ckpt_path is None
    assert not (tmp_path / "test/metrics.csv").exists()


def save(path: Path, step: int, **content: object) -> None:
    checkpoint = {"global_step": step, "state_dict": {}, "loops": {}, **content}
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)


def test_the_results_of_a_finished_run_stay_until_there_are_new_ones(spec, tmp_path: Path):
    cfg = spec("trainer.max_epochs=2")
    run.begin(cfg, [])
    run.finish(cfg, {"a": 1.0})
    longer = spec("trainer.max_epochs=4")
    assert not run.begin(longer, []).finished
    assert json.loads((tmp_path / "test/metrics.json").read_text()) == {"a": 1.0}
    assert not run.begin(cfg, []).finished  # it was killed on its way to new results
    run.finish(longer, {"a": 2.0})
    assert json.loads((tmp_path / "test/metrics.json").read_text()) == {"a": 2.0}
    assert run.begin(cfg, []).finished


def test_only_its_own_results_finish_a_run(spec, tmp_path: Path, caplog):
    cfg = spec()
    run.begin(cfg, [])
    path = tmp_path / "test/metrics.json"
    path.write_text('{"test/accuracy": 0.99}')  # of another run
    assert not run.begin(cfg, []).finished
    run.finish(cfg, {"a": 1.0})
    path.write_text("{}")
    assert not run.begin(cfg, []).finished
    assert "metrics.json cannot be read (it is not what this run has written)" in caplog.text


def test_results_that_are_no_numbers_are_warned_about(spec, tmp_path: Path, caplog):
    cfg = spec()
    run.begin(cfg, [])
    run.finish(cfg, {"val/loss": float("nan"), "test/loss": float("inf"), "a": 1.0})
    (record,) = caplog.records
    assert record.getMessage().startswith("test/loss, val/loss: not a number")


def test_a_run_that_cannot_be_run_leaves_nothing_behind(spec, tmp_path: Path):
    cfg = spec(f"run_root={tmp_path}/new/runs")
    run.begin(cfg, [])
    run.abandon(cfg.run_dir)
    assert not (tmp_path / "new").exists()
    run.begin(cfg, [])
    save(tmp_path / "new/runs/test/checkpoints/last.ckpt", 1)
    run.abandon(cfg.run_dir)
    run.abandon(cfg.run_dir)
    assert (tmp_path / "new/runs/test/checkpoints/last.ckpt").exists()


def test_the_run_of_another_process_is_never_abandoned(spec, tmp_path: Path, monkeypatch):
    acquire = lock.acquire

    def lock_late(run_dir: Path) -> None:
        """Another process was faster, and has ended."""
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text("seed: 0")
        acquire(run_dir)

    monkeypatch.setattr(lock, "acquire", lock_late)
    cfg = spec()
    run.begin(cfg, [])
    run.abandon(cfg.run_dir)
    assert (tmp_path / "test/config.yaml").exists()


def contents(run_dir: Path) -> dict[str, bytes]:
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != lock.FILE]
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in files}


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was(spec, tmp_path: Path):
    begin_and_save(spec())
    run.finish(spec(), {"a": 1.0})
    before = contents(tmp_path / "test")
    changed = spec("seed=7", "trainer.max_epochs=4", "allow_changes=[seed,data.seed]")
    run.begin(changed, [])
    assert contents(tmp_path / "test") != before
    run.abandon(changed.run_dir)
    assert contents(tmp_path / "test") == before
    run.begin(changed, [])
    save(tmp_path / "test/checkpoints/last.ckpt", 2)
    run.abandon(changed.run_dir)  # too late: it has trained with the new configuration
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text())["seed"] == 7


def test_an_old_run_is_never_abandoned(spec, tmp_path: Path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test/config.yaml").write_text("seed: 0")
    cfg = spec()
    run.begin(cfg, [])
    run.abandon(cfg.run_dir)
    assert (tmp_path / "test/config.yaml").read_text() == "seed: 0"


def test_a_run_in_the_directory_of_another_is_told_its_name(spec, tmp_path: Path):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    shutil.copytree(tmp_path / "test", tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"belongs to the run test, .* run is copy.*=test"):
        run.begin(spec("run_id=copy"), [])
    started = run.begin(spec(f"run_dir={tmp_path}/copy"), [])  # the same run, moved on purpose
    assert started.ckpt_path == f"{tmp_path}/copy/checkpoints/last.ckpt"


def test_a_configuration_that_was_changed_on_purpose_keeps_its_checkpoints(spec, tmp_path: Path):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    run.begin(spec("model.optimizer.lr=0.5", "allow_changes=[model.optimizer.lr]"), [])
    assert run.begin(spec("model.optimizer.lr=0.5"), []).ckpt_path
    (tmp_path / "test/config.yaml").unlink()
    assert run.begin(spec(), []).ckpt_path
    (tmp_path / "test/config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"has lost its config.yaml.*RUN_ID"):
        run.begin(spec("seed=7"), [])


def test_a_configuration_without_the_newest_keys_is_the_same(spec, tmp_path: Path):
    begin_and_save(spec())
    path = tmp_path / "test/config.yaml"
    saved = yaml.safe_load(path.read_text())
    del saved["summary"]
    saved["trainer"]["enable_autolog_hparams"] = False
    path.write_text(yaml.safe_dump(saved))
    assert set(find_changes(spec())) > {"summary.metrics"}
    path.write_text(yaml.safe_dump(saved | {"seed": 3}))
    with pytest.raises(ConfigError, match="seed: 3 -> 0"):
        find_changes(spec())


def test_the_user_says_what_else_may_change(spec):
    begin_and_save(spec())
    changed = spec("data.num_val=100")
    with pytest.raises(ConfigError, match=r"data\.num_val"):
        find_changes(changed)
    changed = replace(changed, may_change=[r"data\.num_val"])
    assert find_changes(changed)["data.num_val"][1] == 100


def test_a_best_checkpoint_that_is_missing_is_said(spec, tmp_path: Path):
    cfg = spec()
    run.begin(cfg, [])
    assert run.best_checkpoint(cfg.run_dir) is None  # nothing was saved, as in debug=fast
    folder = tmp_path / "test/checkpoints"
    for step in (None, 40):
        found = {"monitor": "val/loss", "score": 0.25, "step": step}
        save(folder / "last.ckpt", 60, callbacks={"BestCheckpoint": found})
        if step is None:
            assert run.best_checkpoint(cfg.run_dir) is None  # no epoch had a score
    with pytest.raises(CheckpointError, match=r"is missing: .* after step 40, with val/loss=0.25"):
        run.best_checkpoint(cfg.run_dir)
    save(folder / "best.ckpt", 40)
    assert run.best_checkpoint(cfg.run_dir) == str(folder / "best.ckpt")


def damage(path: Path, how: str) -> None:
    """What may happen to a file that nobody looks at."""
    content = path.read_bytes()
    path.unlink()
    match how:
        case "folder":
            (path / "within").mkdir(parents=True)
        case "null":
            path.write_text("null")
        case "fifo":  # a reader would wait for ever
            os.mkfifo(path)
        case "empty":
            path.touch()
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            path.write_bytes(bytes([content[0] ^ 128]) + content[1:])


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "folder", "null", "fifo"])
@pytest.mark.parametrize(
    "name",
    ["metrics.csv", "metrics.json", "logs/environment.json", "logs/finished.json", "config.yaml"],
)
def test_a_damaged_file_is_said_and_kept_aside(
    spec, tmp_path: Path, name: str, how: str, caplog, monkeypatch: pytest.MonkeyPatch
):
    # They take a second, and have tests of their own.
    monkeypatch.setattr("samestep.run.records.surroundings", dict)
    monkeypatch.setattr("samestep.run.records.code_state", lambda code: (None, ""))
    cfg = spec()
    run.begin(cfg, ["train.py"])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    (tmp_path / "test/metrics.csv").write_text("epoch,step,train/loss\n0,19,0.25\n1,39,0.125\n")
    run.finish(cfg, {"a": 1.0, "b": 2.0})
    path = tmp_path / "test" / name
    damage(path, how)
    if name == "config.yaml":
        with pytest.raises(
            ConfigError, match=r"config.yaml cannot be read: .*Restore|holds a run with another"
        ):
            run.begin(cfg, ["train.py"])
        return
    if name == "metrics.csv":
        summarize(tmp_path / "test")
        cfg = spec("trainer.max_epochs=4")  # finished, it would not be looked at
    if name == "logs/environment.json":
        cfg = spec("trainer.max_epochs=4")
    started = run.begin(cfg, ["train.py"])
    assert started == (False, f"{tmp_path}/test/checkpoints/last.ckpt")
    if not (name == "metrics.csv" and how == "cut"):  # a shorter number is a number too
        assert f"{path} cannot be read" in caplog.text
        assert path.with_name(f"{path.name}.damaged").exists()
    run.finish(cfg, {"a": 1.0})
    assert run.begin(cfg, ["train.py"]).finished


def test_metrics_are_exact_sorted_and_replaced_whole(spec, tmp_path: Path):
    cfg = spec()
    run.begin(cfg, ["train.py"])
    run.finish(cfg, {"b": 1 / 3, "a": 1e-45, "c": float("nan")})
    path = tmp_path / "test/metrics.json"
    inode = path.stat().st_ino
    assert json.loads(path.read_text()) == {"a": 1e-45, "b": 1 / 3, "c": None}
    assert path.read_text().index('"a"') == 4
    with path.open() as reader:  # someone reads while it is written
        run.finish(cfg, {"a": 2.0})
        assert "1e-45" in reader.read()
    assert path.stat().st_ino != inode
    assert [file.name for file in path.parent.glob("*metrics*")] == ["metrics.json"]


def test_a_file_in_the_way_of_the_run_directory_is_named(spec, tmp_path: Path):
    (tmp_path / "test").write_text("in the way")
    with pytest.raises(ConfigError, match=r"run_dir=.*/test cannot be written: .*run_root="):
        run.begin(spec(), [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_noticed_before_anything_is_trained(spec, tmp_path: Path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test/.config.yaml.partial").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device"):
        run.begin(spec(), [])
    assert not (tmp_path / "test/config.yaml").exists()


def test_a_disk_that_is_full_later_is_one_message_too():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "predictions/grid.png")
    with (
        pytest.raises(CheckpointError, match=r"^predictions/grid.png cannot be written: No space"),
        run.full_disk_is_one_message("runs/mine"),
    ):
        raise error
    with pytest.raises(FileNotFoundError), run.full_disk_is_one_message("runs/mine"):
        Path("nowhere").read_text()


def test_a_place_where_nobody_may_write_is_named(spec):
    with pytest.raises(ConfigError, match=r"run_dir=/proc/runs/test cannot be written"):
        run.begin(spec("run_root=/proc/runs"), [])


def test_a_run_is_loaded_from_its_directory_alone(digits_run: Path):
    model, data = project.load_run(str(digits_run))
    saved = torch.load(digits_run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    assert not model.training
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    (tested,) = trainer.test(model, data, verbose=False)
    final = json.loads((digits_run / "metrics.json").read_text())
    assert tested == {name: final[name] for name in final if name.startswith("test/")}


def test_the_summary_says_what_the_files_say(digits_run: Path):
    text = summarize(digits_run, seconds=61.4)
    final = json.loads((digits_run / "metrics.json").read_text())
    best = max(row.get("val/accuracy", 0) for row in read_history(digits_run))
    for fact in (
        f"test/accuracy  {final['test/accuracy']:.4f}",
        f"test/loss      {final['test/loss']:.4f}",
        f"val/accuracy   {best:.4f} in epoch ",
        "epochs         2\n",
        "time           0:01:01",
        "images/s       ",
    ):
        assert fact in text, fact


def test_the_summary_says_what_to_type_next(digits_run: Path):
    text = summarize(digits_run)
    assert f"python scripts/evaluate.py {digits_run}\n" in text
    assert f"python scripts/predict.py {digits_run} image.png\n" in text
    assert text.endswith(
        "RUN_ID=digits python train.py trainer.accelerator=cpu data.global_batch_size=60 "
        f"run_root={digits_run.parent} trainer.max_epochs=4"
    )
    assert "time" not in text


def test_commands_that_need_a_checkpoint_are_named_if_there_is_one(spec, tmp_path: Path):
    cfg = spec()
    run.begin(cfg, [])
    assert "evaluate.py" not in summarize(tmp_path / "test")  # of callbacks=null
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    assert "evaluate.py" in summarize(tmp_path / "test")  # without a monitor there is no best one
    state.record(tmp_path / "test", state.FINISHED, monitor="val/loss", best=0.5)
    assert "evaluate.py" not in summarize(tmp_path / "test")  # the best one is lost


def test_the_command_names_the_run_and_not_its_directory(tmp_path: Path):
    cfg = {"run_id": "mine", "run_dir": f"{tmp_path}/here"}
    assert command_to_go_on(cfg, tmp_path / "here", None) == "RUN_ID=mine python train.py"
    moved = command_to_go_on(cfg, tmp_path / "moved", None)
    assert moved == "RUN_ID=moved python train.py", "it must not begin anew in its old place"


@pytest.mark.parametrize(
    ("cluster", "action"), [("k8s", "submit"), ("swarm", "submit"), ("docker", "render")]
)
def test_the_summary_of_a_run_on_a_cluster_names_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, action: str
):
    words = ["train.py", f"cluster={cluster}", "trainer.num_nodes=2", "trainer.max_epochs=3"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/environment.json").write_text(json.dumps([{"command": words}]))
    cfg = {"cluster": {"name": cluster}}
    by_hand = f"RUN_ID={tmp_path.name} python train.py cluster={cluster} trainer.num_nodes=2 "
    assert command_to_go_on(cfg, tmp_path, 3) == f"{by_hand}trainer.max_epochs=6"
    assert command_to_go_on(cfg, tmp_path, 0) == by_hand.rstrip(), "not for 2 * 0 epochs"
    monkeypatch.setenv("SAMESTEP_ON_CLUSTER", "1")  # by the entry point
    assert command_to_go_on(cfg, tmp_path, 3) == (
        f"RUN_ID={tmp_path.name} samestep launch cluster={cluster} trainer.num_nodes=2 "
        f"trainer.max_epochs=6 action={action}"
    )


@pytest.mark.parametrize(
    ("trainer", "callbacks", "words"),
    [
        ({"max_epochs": 3}, {}, ["trainer.max_epochs=6"]),
        # Early stopping, a limit of time, or of steps has ended these.
        (
            {"max_epochs": 20},
            {"patience": 5},
            [
                "trainer.max_epochs=20",
                "callbacks.mine.patience=10",
                "allow_changes=[callbacks.mine.patience]",
            ],
        ),
        ({"max_epochs": 4, "max_time": "00:00:10:00"}, {}, ["trainer.max_epochs=6"]),
        ({"max_epochs": 1000, "max_steps": 50}, {}, ["trainer.max_epochs=6"]),
        ({"max_epochs": -1, "max_steps": 50}, {}, ["trainer.max_epochs=6"]),
    ],
    ids=["epochs", "early stopping", "time", "steps", "steps only"],
)
def test_the_command_for_longer_names_what_had_ended_the_run(tmp_path, trainer, callbacks, words):
    command = ["train.py", "model=mlp", "trainer.max_steps=50", "callbacks.mine.patience=5"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/environment.json").write_text(json.dumps([{"command": command}]))
    node = {"_target_": "lightning.pytorch.callbacks.EarlyStopping"} | callbacks
    cfg = {"trainer": trainer, "callbacks": {"mine": node} if callbacks else {}}
    kept = ["model=mlp"] if callbacks else ["model=mlp", "callbacks.mine.patience=5"]
    again = shlex.split(command_to_go_on(cfg, tmp_path, 3))
    assert again[3:] == [*kept, *words]


@pytest.mark.parametrize(
    ("changed", "is_finished"),
    [
        ([], True),
        (["callbacks.early_stopping.patience=2"], True),
        (["callbacks.early_stopping.patience=9"], False),
        (["~callbacks.early_stopping"], False),
    ],
)
def test_a_finished_run_goes_on_with_more_patience(spec, changed: list[str], is_finished: bool):
    early = "callbacks=early_stopping"
    run.begin(spec(early), [])
    run.finish(spec(early), {"test/loss": 0.5})
    assert run.is_finished(spec(early, *changed)) is is_finished


def test_epochs_of_a_module_with_names_of_its_own_are_counted():
    rows = [{"step": 3.0, "epoch": 0.0, "train_loss": 1.0, "time/epoch_s": 2.0}]
    rows.append({"step": 4.0, "epoch": 1.0, "test_loss": 1.0})
    assert (count_epochs(rows), count_steps(rows)) == (1, 4)


def test_a_text_that_looks_like_a_reference_is_saved_and_read_as_it_is(spec, tmp_path: Path):
    words = ["callbacks.progress.unit='\\${nope}'", "data.class_names=['\\${run_id}',a]"]
    cfg = spec(*words, "data.num_classes=2")
    begin_and_save(cfg)
    assert find_changes(spec(*words, "data.num_classes=2")) == {}
    read = read_config(tmp_path / "test")
    assert select(read, "callbacks.progress.unit") == "${nope}"
    assert read["data"]["class_names"][0] == "${run_id}"
    run.finish(cfg, {"test/accuracy": 0.5})
