"""Wrong command lines: exit code 2, one message, and nothing left behind. Real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NO_PICTURES, ROOT, environment, run, run_code

pytestmark = pytest.mark.program

# Overrides or flags, and a part of the message. Each exits with code 2.
REFUSED_AT_ONCE = [  # by the configuration alone, without torch
    ("trainer.max_epoch=3", "no such key; did you mean trainer.max_epochs=3?"),
    ("data.root=Läufe", "in quotes within quotes: \"data.root='Läufe'\""),
    ("sweep=digits_lr", "is for another command, samestep sweep sweep=digits_lr"),
    ("seed=1,2", "is several values; put -m before it"),
    ("trainer.max_time=abc", "must be null or text such as 00:12:00:00"),
    ("run_dir=runs/..", "run_dir=runs/..: must be a directory of its own"),
    ("--nonsense", "error: train.py: --nonsense: no such option; --help lists all"),
    ("--epochs 5", "--epochs: no such option; did you mean trainer.max_epochs=5?"),
    ("-seed=1", "-seed=1: no such option; did you mean seed=1?"),
    ("--nproc-per-node=2", "no such option; did you mean trainer.devices=2?"),
    ("--multirun=seed=1,2", "--multirun/-m: takes no value; put a space before 'seed=1,2'"),
    ("seed = 1", "seed: is not an override; write KEY=VALUE or GROUP=CHOICE, without spaces"),
    ("--batch-size=8", "no such option; did you mean data.global_batch_size=8?"),
    ("data.batch_size=8", "no such key; did you mean data.global_batch_size=8?"),
    ("-m seed=1,2 hydra/launcher=joblib", "each run of a grid has processes of its own"),
    ("trainer.num_nodes=2", "several nodes are started by torchrun"),
]
REFUSED_BEFORE_THE_RUN = [  # once everything is built, and before the run directory is made
    ("data=folder data.root=/no data.num_classes=2", "data.root=/no: [Errno 2] No such file"),
    ("data.num_val=1437", "data.num_val=1437: leaves 0 images, no batch"),
    ("cluster.shares=[1,2]", "the run may have 1 ranks on 1 nodes; give one number for each rank"),
    ("trainer.accelerator=mps", "`MPSAccelerator` can not run on your system"),
    ("trainer.devices=2 trainer.sync_batchnorm=true", "needs GPUs, and these ranks are on CPUs"),
    (
        "callbacks.checkpoints.monitor=val/acuracy",
        "validation logs val/accuracy, val/loss; choose one of these",
    ),
    ("trainer.val_check_interval=50", "must be at most the 39 batches of an epoch"),
    ("model.optimizer.betas=[0.9]", "raised: "),
    ("model.net._target_=no_such_package.Net", "the module no_such_package is missing; if it is"),
    ("+callbacks.x._target_=builtins.dict", "does not say its arguments"),
    ("experiment=language data.file=none.txt", "data.file=none.txt: cannot be read"),
    ("data=mnist cluster=k8s data.root=/nowhere", "Dataset not found"),
]


EACH = """
import json, os, runpy, sys
import lightning, project.train
from samestep.hydra import build, main
for number, line in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{sys.argv[2]}/{number}-{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["train.py", *line]
        runpy.run_path("train.py", run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Runs ``train.py`` on each of these lines, in a fork of a process that has imported it."""


def run_each(lines: list[list[str]], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    done = run_code(EACH, json.dumps(lines), str(folder), PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    codes = [int(code) for code in done.stdout.split()]
    assert len(codes) == len(lines), done.stderr
    said = [
        [(folder / f"{number}-{name}").read_text() for name in ("stdout", "stderr")]
        for number in range(len(lines))
    ]
    return [
        subprocess.CompletedProcess(line, code, *texts)
        for line, code, texts in zip(lines, codes, said, strict=True)
    ]


@pytest.mark.parametrize(
    "table", [REFUSED_AT_ONCE, REFUSED_BEFORE_THE_RUN], ids=["at once", "later"]
)
def test_a_refused_line_is_one_message_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]]
):
    said, here = tmp_path_factory.mktemp("said"), tmp_path_factory.mktemp("here")
    place = f"run_root={here / 'runs'}"
    lines = [line.split(" ") for line, _ in table]
    typed = [
        words if words[0][0] == "-" and "=" not in words[0] else [*words, place] for words in lines
    ]
    is_alone = ["trainer.devices=2" in words for words in typed]  # it starts ranks
    forked = iter(
        run_each([w for w, alone in zip(typed, is_alone, strict=True) if not alone], said)
    )
    for (line, text), words, alone in zip(table, typed, is_alone, strict=True):
        done = run("train.py", *words) if alone else next(forked)
        assert done.returncode == 2, (line, done.stderr)
        assert done.stderr.startswith("error: "), line
        assert text in done.stderr, (line, done.stderr)
        assert "Traceback" not in done.stderr, line
    assert not list(here.iterdir())


def test_accepted_lines_train(tmp_path_factory: pytest.TempPathFactory):
    said, here = tmp_path_factory.mktemp("said"), tmp_path_factory.mktemp("here")
    lines = [
        "logger=null callbacks=null",
        f"+trainer.benchmark=false trainer.detect_anomaly=true trainer.strategy=ddp {NO_PICTURES}",
        f"hydra.verbose=false +seed=1 {NO_PICTURES}",
    ]
    quick = ["debug=limit", "model=mlp"]
    words = [[*quick, *line.split(), f"run_root={here / str(n)}"] for n, line in enumerate(lines)]
    for number, done in enumerate(run_each(words, said)):
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert len(list(here.glob(f"{number}/*/metrics.csv"))) == 1
    (shown,) = run_each([["--cfg", "job", "--package", "model", "model=mlp", "logger=null",
                          "model.optimizer.amsgrad=true"]], said)  # fmt: skip
    assert (shown.returncode, "amsgrad: true" in shown.stdout) == (0, True)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash", "SLURM_JOB_ID": "1"},
        {"TORCHELASTIC_RUN_ID": "left-over"},
    ],
    ids=["slurm", "torchelastic"],
)
def test_without_torchrun_it_is_one_process_whatever_the_variables_say(tmp_path: Path, variables):
    words = ["debug=limit", "model=mlp", NO_PICTURES, f"run_root={tmp_path}"]
    result = run("train.py", *words, **variables)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.iterdir()
    assert run_dir.name.startswith("digits-mlp-")
    assert (run_dir / "metrics.csv").exists()


def test_losing_the_reader_does_not_lose_the_run(tmp_path: Path):
    """Closed streams, encodings and backends of matplotlib: library/tests/ranks/test_process.py."""
    chatty = ["train.py", "model=mlp", "debug=limit", "callbacks.progress.log_every_s=1e-9"]
    with subprocess.Popen(
        [sys.executable, *chatty, NO_PICTURES, f"run_root={tmp_path}"], cwd=ROOT,
        env=environment(RUN_ID="mine"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert (tmp_path / "mine/metrics.json").exists()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("sys.version_info = (3, 10, 4, 'final', 0)", "error: needs Python 3.11 to 3.14; "),
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
    assert "  samestep evaluate 'Läufe hier/mine'\n" in result.stdout
