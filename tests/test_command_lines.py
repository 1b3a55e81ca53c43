"""Wrong command lines: exit code 2, one message, and nothing left behind. Real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NO_PICTURES, ROOT, environment, run

# Overrides or flags, and a part of the message. Each exits with code 2.
REFUSED_AT_ONCE = [  # by the configuration alone, without torch
    ("trainer.max_epoch=3", "no such key; did you mean trainer.max_epochs=3?"),
    ("data=mnsit", "no such choice; did you mean data=mnist?"),
    ("data.root=Läufe", "in quotes within quotes: \"data.root='Läufe'\""),
    ("sweep=digits_lr", "is for another command, samestep sweep sweep=digits_lr"),
    ("seed=1,2", "is several values; put -m before it"),
    ("trainer.max_time=abc", "must be null or text such as 00:12:00:00"),
    ("trainer.max_time=5", "must be null or text such as 00:12:00:00"),
    ("trainer.max_epochs=-1", "must know where the run ends"),
    ("trainer.accelerator=cuda", "must be one of auto, cpu, gpu, mps, tpu"),
    ("trainer.overfit_batches=0.1", "use debug=overfit"),
    ("trainer.enable_checkpointing=false", "must be left out: callbacks=null saves no"),
    ("trainer.use_distributed_sampler=true", "must be left out: each rank always gets its share"),
    ("trainer=3", "trainer=3: no such choice"),
    ("choices.data=mnist", "choices.data=mnist: no such key"),
    ("rules=no.module", "rules=no.module: No module named 'no'"),
    ("data=null", "ImageClassifier needs data.num_classes, data.num_channels, "),
    ("x" * 5000 + "=1", "a key or a choice cannot be used: File name too long"),
    ("RUN_ID=mine", "RUN_ID=mine: no such key; did you mean run_id=mine?"),
    ("model.optimizer.lr=null", "lr=null: torch.optim.AdamW needs a number above 0"),
    ("=5", "=5: has no key; write KEY=VALUE or GROUP=CHOICE"),
    ("run_dir=", "), and not empty"),
    ("run_dir=/", "run_dir=/: must be a directory of its own"),
    ("run_dir=runs/..", "run_dir=runs/..: must be a directory of its own"),
    ("data=mnist data.mirror=host", "data.mirror=host: must be null or an address such as http://"),
    ("--shell-completion", "--shell-completion: add install=bash"),
    ("--nonsense", "error: train.py: --nonsense: no such option; --help lists all"),
    ("--config-dir elsewhere", "train.py: --config-dir: no such option"),
    ("-m seed=1,2 trainer.devices=2", "-m: trains one process per run"),
    ("-m seed=1,-2", "seed=-2: must be a whole number from 0"),
    ("trainer.num_nodes=2", "several nodes are started by torchrun"),
    ("cluster.shares=[1,0]", "must be one of equal, auto or a list of numbers above 0"),
    ("cluster.shares=auto trainer=fsdp", "trainer.strategy=fsdp gives every rank the same share"),
]
REFUSED_BEFORE_THE_RUN = [  # once everything is built, and before the run directory is made
    ("data=folder data.root=/no data.num_classes=2", "/no/train cannot be read: No such file"),
    ("data.num_val=1437", "is too much for 1437 training images; add data.num_val=143 "),
    ("data.image_size=9", "the images found have the shape [1, 8, 8]"),
    ("data.global_batch_size=5000", "data.global_batch_size=5000: is too much for 1437 "),
    ("cluster.shares=[1,2]", "the run may have 1 ranks on 1 nodes; give one number for each rank"),
    ("trainer.accelerator=mps", "`MPSAccelerator` can not run on your system"),
    ("trainer.strategy=fsdp", "needs GPUs, and this machine has none"),
    ("trainer.devices=2 trainer.sync_batchnorm=true", "needs GPUs, and these ranks are on CPUs"),
    (
        "callbacks.checkpoints.monitor=vol/accuracy",
        "the model logs no such metric; did you mean val/accuracy?",
    ),
    ("trainer.limit_test_batches=0.5", "limit_test_batches=0.5: selects none of the 1 test"),
    ("model.num_classes=11", "model.num_classes=11: the data have data.num_classes=10; leave"),
    ("callbacks.checkpoints.monitor=nope", "the model logs no such metric; It logs "),
    ("trainer.val_check_interval=50", "must be at most the 39 batches of an epoch"),
    ("callbacks.artifacts.url=foo://x", "Protocol not known: foo"),
    ("model.optimizer.betas=[0.9]", "raised: "),
    ("model.net._target_=project.nope.Net", "there is no such object"),
    ("model.net._target_=no_such_package.Net", "the module no_such_package is missing; if it is"),
    ("model.net._target_=torch", "must be a class or a function"),
    ("+callbacks.x._target_=builtins.dict", "does not say its arguments"),
    ("+callbacks.x._target_=os.system", "os.system needs a value for command"),
    ("model=mlp model.net.hidden_size=0", "hidden_size=0: must be at least 1"),
    ("+model.net.width=0.75", "takes no argument 'width'"),
    ("data=mnist cluster=k8s data.root=/nowhere", "is missing, and data.download is false"),
]


def names(table):
    return [line[:60] for line, _ in table]


def refused(tmp_path: Path, line: str) -> str:
    """What a command line says that must be refused; it may leave nothing behind."""
    words = line.split(" ")
    place = [] if line.startswith("-") and "=" not in line else [f"run_root={tmp_path / 'runs'}"]
    result = run("train.py", *words, *place)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
    return result.stderr


@pytest.mark.parametrize(("line", "text"), REFUSED_AT_ONCE, ids=names(REFUSED_AT_ONCE))
def test_refused_at_once(tmp_path: Path, line: str, text: str):
    assert text in refused(tmp_path, line)


@pytest.mark.parametrize(
    ("line", "text"), REFUSED_BEFORE_THE_RUN, ids=names(REFUSED_BEFORE_THE_RUN)
)
def test_refused_before_the_run_begins(tmp_path: Path, line: str, text: str):
    assert text in refused(tmp_path, line)


@pytest.mark.parametrize(
    "line",
    [
        "logger=null callbacks=null",
        "logger=[] callbacks=[]",
        "+trainer.benchmark=false trainer.detect_anomaly=true trainer.strategy=ddp",
        "hydra.verbose=false +seed=1",
    ],
)
def test_accepted(tmp_path: Path, line: str):
    pictures = [] if "callbacks=" in line else [NO_PICTURES]
    words = ["debug=fast", "model=mlp", *line.split(" "), *pictures, f"run_root={tmp_path}"]
    result = run("train.py", *words)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert len(list(tmp_path.glob("*/metrics.csv"))) == 1


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash", "SLURM_JOB_ID": "1"},
        {"TORCHELASTIC_RUN_ID": "left-over"},
    ],
    ids=["slurm", "torchelastic"],
)
def test_without_torchrun_it_is_one_process_whatever_the_variables_say(tmp_path: Path, variables):
    words = ["debug=fast", "model=mlp", NO_PICTURES, f"run_root={tmp_path}"]
    result = run("train.py", *words, timeout=120, **variables)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.iterdir()
    assert run_dir.name.startswith("digits-mlp-")
    assert (run_dir / "metrics.csv").exists()


@pytest.mark.parametrize("flag", ["--cfg job", "--cfg job --package model"])
def test_flags_show_what_is_composed(flag: str):
    words = ["model=mlp", "logger=null", "model.optimizer.amsgrad=true"]
    result = run("train.py", *flag.split(" "), *words)
    assert result.returncode == 0, result.stderr
    assert "amsgrad: true" in result.stdout


CHATTY = ["train.py", "model=mlp", "debug=limit", "callbacks.progress.log_every_s=1e-9"]


def test_losing_the_reader_does_not_lose_the_run(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, *CHATTY, NO_PICTURES, f"run_root={tmp_path}"], cwd=ROOT,
        env=environment(RUN_ID="mine"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert (tmp_path / "mine/metrics.json").exists()


def test_a_run_needs_no_stdout_no_screen_and_no_utf8(tmp_path: Path):
    line = f"{sys.executable} {' '.join(CHATTY)} run_root={tmp_path} >&-"
    variables = environment(RUN_ID="mine", MPLBACKEND="foo", LC_ALL="C", PYTHONUTF8="0")
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "mine/metrics.json").exists()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("sys.version_info = (3, 10, 4, 'final', 0)", "error: needs Python 3.11 to 3.13; "),
        ("sys.modules['hydra'] = None", "has no package hydra; use .venv/bin/python, which `make"),
    ],
    ids=["wrong Python", "no packages"],
)
def test_the_wrong_python_is_one_message(code: str, text: str):
    program = f"import runpy, sys; {code}; runpy.run_path('train.py', run_name='__main__')"
    result = run("-c", program)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_names_with_spaces_and_other_letters(tmp_path: Path):
    """Also from another directory; the commands that are printed can be pasted."""
    place = tmp_path / "Mein Projekt ä"
    place.mkdir()
    words = ["debug=limit", "model=mlp", NO_PICTURES, "run_root='Läufe hier'"]
    result = run(str(ROOT / "train.py"), *words, cwd=place, RUN_ID="mine")
    assert result.returncode == 0, result.stderr
    assert (place / "Läufe hier/mine/metrics.json").exists()
    assert "  python scripts/evaluate.py 'Läufe hier/mine'\n" in result.stdout
