"""What a run promises, whatever front end starts it.

Each front end has a test file that imports these tests, a fixture ``start`` that runs
``library.tests.small`` by it, and a fixture ``precision``: here ``test_guarantees.py``.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Protocol

import torch

from library.tests.kit import check_same, weights
from samestep.run import record
from samestep.run.metrics import read_final_metrics


class Start(Protocol):
    """Starts the run ``runs/NAME`` in ``folder``, and waits for its end."""

    folder: Path
    option: Callable[[str], str]
    """How messages name an argument of the Trainer."""

    def __call__(self, name: str, /, **options: Any) -> CompletedProcess[str]:
        """Upper-case options are variables of the environment, others arguments of the Trainer.

        ``url`` is that of Artifacts, ``stop_on`` the metric of an EarlyStopping.
        """


def check_rejected(done: CompletedProcess[str], run_dir: Path, message: str) -> None:
    """One line, exit code 2, and nothing left behind."""
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()


def test_a_run_that_is_stopped_and_killed_ends_as_an_undisturbed_one(start: Start, precision: str):
    whole, parts = start.folder / "runs/whole", start.folder / "runs/parts"
    assert start("whole", precision=precision).returncode == 0
    done = start("parts", precision=precision, AT="11", HOW="SIGTERM")
    assert done.returncode == 143, done.stderr
    assert "To continue: " in done.stdout
    done = start("parts", precision=precision, AT="19", HOW="SIGKILL")
    assert done.returncode in (-9, 137), done.stderr
    done = start("parts", precision=precision)
    assert done.returncode == 0, done.stderr
    assert "Continuing: " in done.stdout
    check_same(parts, whole)
    ours, theirs = read_final_metrics(parts), read_final_metrics(whole)
    assert ours
    assert theirs
    assert (ours["test/loss"], ours["val/loss"]) == (theirs["test/loss"], theirs["val/loss"])
    # It is left alone, and tested with the same weights.
    files = {path: path.stat().st_mtime_ns for path in parts.glob("checkpoints/*.ckpt")}
    again = start("parts", precision=precision)
    assert again.returncode == 0, again.stderr
    assert "Nothing to do" in again.stdout
    assert read_final_metrics(parts) == ours
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_nan_loss_is_one_line_that_names_the_step_and_the_remedy(start: Start):
    done = start("nan", AT="11", HOW="nan")
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "step 12: the loss on rank 0 is infinite or nan" in done.stderr
    assert f"{start.option('max_skipped')}=10" in done.stderr
    assert "Traceback" not in done.stderr
    assert record.read(start.folder / "runs/nan").state == record.FAILED


def test_early_stopping_on_a_metric_that_nobody_logs_is_rejected(start: Start):
    done = start("stop", stop_on="train/los")
    message = f"{start.option('EarlyStopping.monitor')}: Early stopping conditioned on metric"
    check_rejected(done, start.folder / "runs/stop", message)


def test_a_monitor_that_nobody_logs_is_rejected(start: Start):
    done = start("monitor", monitor="val/los")
    message = f"{start.option('monitor')}=val/los: validation logs val/loss"
    check_rejected(done, start.folder / "runs/monitor", message)


def test_missing_data_are_found_before_a_run_begins(start: Start):
    done = start("data", DATA="missing")
    check_rejected(done, start.folder / "runs/data", "error: the samples are missing; make some")


def test_a_validation_that_never_comes_is_rejected(start: Start):
    done = start("interval", val_check_interval=9)
    message = f"{start.option('val_check_interval')}=9: must be at most the 8 batches of an epoch"
    check_rejected(done, start.folder / "runs/interval", message)


def test_a_copy_is_continued_on_an_empty_machine(start: Start):
    """Before, ``Artifacts`` in a script started over, and overwrote the newer copy."""
    url, run_dir = f"file://{start.folder}/store", start.folder / "runs/copied"
    done = start("copied", url=url, AT="19", HOW="SIGTERM")
    assert done.returncode == 143, done.stderr
    shutil.rmtree(run_dir)
    done = start("copied", url=url)
    assert done.returncode == 0, done.stderr
    assert "Continuing: " in done.stdout
    assert start("undisturbed").returncode == 0
    check_same(run_dir, start.folder / "runs/undisturbed")
    copied = start.folder / "store/copied"
    check_same(copied, run_dir)
    # Of the test too, which follows the training.
    assert read_final_metrics(copied) == read_final_metrics(run_dir)
    assert "test/loss" in (read_final_metrics(copied) or {})


def test_parameters_without_a_gradient_are_rejected_on_two_ranks(start: Start):
    done = start("unused", devices=2, UNUSED="1")
    assert done.returncode == 2, done.stderr
    message = "a step leaves parameters of the model without a gradient"
    assert f"{start.option('strategy')}: {message}" in done.stderr
    assert "unused.weight, unused.bias" in done.stderr
    assert f"{start.option('strategy')}=ddp_find_unused_parameters_true" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_strategy_object_trains_as_its_name_does(start: Start):
    for strategy in ("ddp", "DDPStrategy"):
        done = start(strategy, devices=2, strategy=strategy)
        assert done.returncode == 0, done.stderr
    check_same(start.folder / "runs/DDPStrategy", start.folder / "runs/ddp")
    assert start("one").returncode == 0
    one, two = weights(start.folder / "runs/one"), weights(start.folder / "runs/ddp")
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
