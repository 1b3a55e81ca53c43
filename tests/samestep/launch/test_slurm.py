"""Slurm: what the script says and does, with programs that take the place of Slurm's."""

import json
import os
import random
import subprocess
import sys

import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch import render
from tests.launching import launch, line_of, samestep

FAKES = {  # programs of Slurm that write down what they are told
    "srun": "import json, os, sys\n"
    "print(json.dumps([os.environ['RUN_ID'], *sys.argv[1:]]), file=open('srun.txt', 'a'))\n"
    "sys.exit(int(os.environ['EXIT_CODE']))\n",
    "scontrol": "import sys\nprint(*sys.argv[1:], file=open('scontrol.txt', 'a'))\n",
}


def configured(*words, run_id="cifar"):
    cfg = check(["cluster=slurm", *words])
    cfg.run_id = run_id
    return cfg


def script(*words):
    given = ["cluster=slurm", *words]
    return render.text(render.render(configured(*words), given))


def options(*words):
    lines = script(*words).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


@pytest.fixture
def execute(tmp_path):
    """Run a script as Slurm's first node would; give what srun and scontrol were told."""
    for name, code in FAKES.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{code}")
        (tmp_path / name).chmod(0o755)

    def execute(text, exit_code=0, **variables):
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "cifar", "EXIT_CODE": str(exit_code), **variables,
        }  # fmt: skip
        done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=env, check=False)
        assert done.returncode == exit_code
        asked = tmp_path / "scontrol.txt"
        told = [json.loads(line) for line in (tmp_path / "srun.txt").read_text().splitlines()]
        return told[-1], asked.read_text().splitlines() if asked.exists() else []

    return execute


def test_values_become_options_and_null_is_left_out():
    assert not [word for word in options() if word.startswith(("--partition", "--time", "--acc"))]
    assert "--gpus-per-node=1" in options()
    found = options(
        "cluster.partition=gpu", "cluster.account=team", "cluster.time=1-12:00:00",
        "trainer.num_nodes=4", "trainer.devices=8", "cluster.memory=64G", "run_root=/shared/runs",
        'cluster.options=["--qos=high", "--comment=a b"]',
    )  # fmt: skip
    assert {
        "--job-name=cifar", "--partition=gpu", "--account=team", "--time=1-12:00:00", "--nodes=4",
        "--ntasks-per-node=1", "--gpus-per-node=8", "--mem=64G", "--output=/shared/runs/%x.out",
        "--qos=high", "'--comment=a b'", "--requeue", "--signal=TERM@120", "--open-mode=append",
    } <= {*found}  # fmt: skip
    assert not [word for word in options("trainer.accelerator=cpu") if "gpu" in word]


@pytest.mark.program
def test_the_tasks_get_the_overrides_as_typed(execute):
    generator = random.Random(0)
    pieces = [*"${}()\\\n\t\"':=#- ", "${seed}", "$(RUN_ID)", "$$", "\\${", "é", "データ", "null"]
    words = ["".join(generator.choices(pieces, k=generator.randint(0, 12))) for _ in range(100)]
    (run_id, *told), _ = execute(render.text(render.render(configured(), words)))
    assert run_id == "cifar"
    assert told[-100:] == words
    start = told.index("-m")
    assert told[start - 1 : start + 2] == [".venv/bin/python", "-m", "samestep.launch.entrypoint"]


@pytest.mark.program
@pytest.mark.parametrize(
    ("exit_code", "restarts", "is_requeued"),
    [(0, 0, False), (2, 0, False), (143, 99, True), (137, 2, True),
     (1, 3, False)],
)  # fmt: skip
def test_the_job_is_queued_again_by_its_exit_code(execute, exit_code, restarts, is_requeued):
    variables = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    _, asked = execute(script(), exit_code, **variables)
    assert asked == (["requeue 7"] if is_requeued else [])


@pytest.mark.program
def test_each_trial_is_a_run_of_its_own(execute):
    text = script('cluster.trials=["seed=1", "data.root=a b$HOME"]')
    assert "#SBATCH --array=0-1\n" in text
    assert "#SBATCH --output=runs/%x-%a.out\n" in text
    for number, trial in enumerate(["seed=1", "data.root=a b$HOME"]):
        told, _ = execute(text, SLURM_ARRAY_TASK_ID=str(number))
        assert (told[0], told[-1]) == (f"cifar-{number}", trial)


@pytest.mark.program
@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("pyxis", ["--container-image=ours:1", "--container-mounts={}",
                   "--container-workdir=/workspace", "--no-container-mount-home", "python", "-m"]),
        ("apptainer", ["apptainer", "exec", "--nv", "--bind={}",
                       "--pwd=/workspace", "ours:1", "python", "-m"]),
    ],
)  # fmt: skip
def test_a_container_starts_the_entry_point(execute, container, words):
    given = ["cluster.image=ours:1", "cluster.runs=/s/r", "cluster.data=/s/d"]
    (_, *told), _ = execute(script(f"cluster.container={container}", *given))
    start = told.index("-m")
    mounts = "/s/r:/workspace/runs,/s/d:/workspace/data"
    expected = [word.format(mounts) for word in words]
    assert told[start + 1 - len(words) : start + 1] == expected


def test_a_container_is_one_of_those_that_can_be_started():
    with pytest.raises(
        ConfigError, match="container=docker: must be one of none, pyxis, apptainer"
    ):
        check(["cluster=slurm", "cluster.container=docker"])


def test_a_trial_is_checked_before_it_is_sent():
    result = launch("cluster=slurm", 'cluster.trials=["seed=1", "sed=2"]', "--render")
    assert (result.returncode, result.stdout) == (2, "")
    assert "sed" in result.stderr
    assert "did you mean seed" in result.stderr


def test_the_script_names_variables_and_holds_no_values():
    result = launch("cluster=slurm", "--render", WANDB_API_KEY="0123456789abcdef")
    assert result.returncode == 0, result.stderr
    assert "WANDB_API_KEY" in result.stdout
    assert "0123456789abcdef" not in result.stdout
    (line,) = [word for word in options() if word.startswith("--export=")]
    assert "ALL" not in line  # the whole environment would hold every secret of the shell


@pytest.mark.program
def test_without_slurm_one_message_says_so(tmp_path):
    words = line_of("submit", "cifar", "cluster=slurm")
    result = samestep(*words, cwd=tmp_path, RUN_ID="cifar", PATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: squeue: no such command on this machine")
    assert "Traceback" not in result.stderr
    checked = launch("cluster=slurm", "--check", RUN_ID="cifar", PATH=str(tmp_path))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "no errors in the configuration" in checked.stdout
    assert "Slurm was not checked" in checked.stdout
