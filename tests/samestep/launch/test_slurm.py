"""Slurm: what the script says and does, with programs that take the place of Slurm's."""

import json
import os
import random
import subprocess
import sys

import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch import check as rules
from samestep.launch import render, slurm_errors
from tests.launching import launch, line_of, samestep

FOLDERS = ["cluster.container=pyxis", "cluster.runs=/s/r", "cluster.data=/s/d"]
FAKES = {  # programs of Slurm that write down what they are told
    "srun": "import json, os, signal, sys, time\n"
    "print(json.dumps([os.environ['RUN_ID'], *sys.argv[1:]]), file=open('srun.txt', 'a'))\n"
    "if 'STOPPED' in os.environ: os.kill(os.getppid(), signal.SIGTERM)\n"
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


def test_the_tasks_get_the_overrides_as_typed(execute):
    generator = random.Random(0)
    pieces = [*"${}()\\\n\t\"':=#- ", "${seed}", "$(RUN_ID)", "$$", "\\${", "é", "データ", "null"]
    words = ["".join(generator.choices(pieces, k=generator.randint(0, 12))) for _ in range(100)]
    (run_id, *told), _ = execute(render.text(render.render(configured(), words)))
    assert run_id == "cifar"
    assert told[-100:] == words
    start = told.index("-m")
    assert told[start - 1 : start + 2] == [".venv/bin/python", "-m", "samestep.launch.entrypoint"]


@pytest.mark.parametrize(
    ("exit_code", "restarts", "is_requeued"),
    [(0, 0, False), (2, 0, False), (143, 0, True), (143, 99, True), (1, 0, True), (137, 2, True),
     (1, 3, False)],
)  # fmt: skip
def test_the_job_is_queued_again_by_its_exit_code(execute, exit_code, restarts, is_requeued):
    variables = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    _, asked = execute(script(), exit_code, **variables)
    assert asked == (["requeue 7"] if is_requeued else [])


def test_a_job_that_slurm_ends_is_not_queued_again(execute):
    """Otherwise a run that was cancelled would come back."""
    _, asked = execute(script(), 143, STOPPED="1")
    assert asked == []


def test_each_trial_is_a_run_of_its_own(execute):
    text = script('cluster.trials=["seed=1", "data.root=a b$HOME"]')
    assert "#SBATCH --array=0-1\n" in text
    assert "#SBATCH --output=runs/%x-%a.out\n" in text
    for number, trial in enumerate(["seed=1", "data.root=a b$HOME"]):
        told, _ = execute(text, SLURM_ARRAY_TASK_ID=str(number))
        assert (told[0], told[-1]) == (f"cifar-{number}", trial)


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


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["cluster.memory=16Gi"], "cluster.memory=16Gi: Slurm takes whole numbers such as"),
        (["cluster.image=ours:1"], "cluster.image=ours:1: is only for a container; add"),
        (
            [*FOLDERS[:2], "cluster.image=ours:1"],
            "cluster.data=null: cluster.container=pyxis needs",
        ),
        (FOLDERS, "cluster.image=null: cluster.container=pyxis needs"),
        ([*FOLDERS, "cluster.image=ours"], "cluster.image=ours: may name another image"),
        (["cluster.time=4"], "cluster.time=4: must be more than twice cluster.grace_s=120 seconds"),
        (["cluster.time=3:59"], "cluster.time=3:59: must be more than twice"),
        (["cluster.time=0-0:3"], "cluster.time=0-0:3: must be more than twice"),
        (["cluster.time=soon"], "cluster.time=soon: must be minutes, hours:minutes:seconds or"),
        (["trainer.devices=auto"], "trainer.devices=auto: a cluster must be told"),
        (["cluster.grace_s=60"], "cluster.grace_s=60: must be more than cluster.shutdown_s=90"),
        (['cluster.trials=["api_key=abc12345678"]'], "cluster.trials[0]: is a secret"),
    ],
)
def test_a_mistake_is_found(words, fault):
    (found,) = rules.faults(configured(*words), [])
    assert found.startswith(fault)


def test_a_container_is_one_of_those_that_can_be_started():
    with pytest.raises(
        ConfigError, match="container=docker: must be one of none, pyxis, apptainer"
    ):
        check(["cluster=slurm", "cluster.container=docker"])


def test_a_file_may_be_an_image():
    given = [*FOLDERS, "cluster.image=/s/project.sif"]
    assert list(rules.faults(configured(*given), [])) == []


@pytest.mark.parametrize("time", ["5", "4:01", "0:05:00", "1-0", "0-1:00", "2-12:30:00"])
def test_a_time_limit_may_have_every_form_of_slurm(time):
    assert list(rules.faults(configured(f"cluster.time={time}"), [])) == []


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


@pytest.mark.parametrize("action", ["submit", "status", "logs", "cancel"])
def test_without_slurm_one_message_says_so(action, tmp_path):
    words = line_of(action, "cifar", "cluster=slurm")
    result = samestep(*words, cwd=tmp_path, RUN_ID="cifar", PATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: squeue: no such command on this machine")
    assert "Traceback" not in result.stderr


def test_without_slurm_a_run_is_checked_all_the_same(tmp_path):
    result = launch("cluster=slurm", "--check", RUN_ID="cifar", PATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert "no mistakes found" in result.stdout
    assert "Slurm was not asked" in result.stdout


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        ("sbatch: error: invalid partition specified: gpux\nsbatch: error: Batch job submission "
         "failed: Invalid partition name specified", "Slurm has no partition gpux"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition "
         "combination specified", "Slurm does not know this account"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or "
         "exceeds some limit)", "cluster.time is no time limit"),
        ("sbatch: error: Memory specification can not be satisfied\nsbatch: error: Batch job "
         "submission failed: Requested node configuration is not available", "no node has that"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not "
         "available", "the partition has no such nodes"),
        ("sbatch: error: Batch job submission failed: Invalid generic resource (gres) "
         "specification", "the nodes have no such GPUs"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
         "Slurm does not answer"),
        ("sbatch: error: something new", "sbatch: error: something new"),
        ("", "Slurm's command failed"),
    ],
)  # fmt: skip
def test_an_error_of_slurm_is_explained(stderr, sentence):
    assert slurm_errors.explain_error(stderr).startswith(sentence)


@pytest.mark.parametrize(
    ("state", "reason", "sentence"),
    [
        ("PENDING", "Resources", "it waits until nodes are free (Resources)"),
        ("PENDING", "Priority", "it waits for jobs with a higher priority (Priority)"),
        ("PENDING", "BeginTime", "it is queued again, and starts in about two minutes (BeginTime)"),
        ("PENDING", "PartitionTimeLimit", "cluster.time is longer than the partition allows"),
        ("PENDING", "InvalidAccount", "you may not use this account, QOS or partition (InvalidAcc"),
        ("PENDING", "QOSMaxGRESPerUser", "a limit of your account or QOS is reached (QOSMaxGRES"),
        ("PENDING", "AssocGrpCpuLimit", "a limit of your account or QOS is reached (AssocGrpCpu"),
        ("PENDING", "ReqNodeNotAvail,_UnavailableNodes:a", "its nodes are down, reserved"),
        ("PENDING", "launch_failed_requeued_held", "it is held: scontrol release"),
        ("PENDING", "SomethingNew", "SomethingNew"),
        ("PENDING", "None", ""),
        ("TIMEOUT", "TimeLimit", "it did not stop within cluster.grace_s"),
        ("OUT_OF_MEMORY", "OutOfMemory", "it used more memory than cluster.memory"),
        ("FAILED", "NonZeroExitCode", "exit code 2: wrong configuration"),
    ],
)
def test_a_reason_is_explained(state, reason, sentence):
    job = {"JobState": state, "Reason": reason, "ExitCode": "2:0" if state == "FAILED" else "0:0"}
    assert slurm_errors.explain(job).startswith(sentence)
