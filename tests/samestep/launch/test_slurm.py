"""Slurm: what the script says and does, with programs that take the place of Slurm's."""

import json
import os
import random
import subprocess
import sys

import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch import render, slurm
from tests.conftest import ROOT
from tests.launching import launch, line_of, samestep
from tests.samestep.launch.fake_slurm import SUBMITTED, FakeSlurm

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
        'cluster.options=["--qos=high", "--constraint=a b"]',
    )  # fmt: skip
    assert {
        "--job-name=cifar", "--partition=gpu", "--account=team", "--time=1-12:00:00", "--nodes=4",
        "--ntasks-per-node=1", "--gpus-per-node=8", "--mem=64G", "--output=/shared/runs/%x.out",
        "--qos=high", "'--constraint=a b'", "--requeue", "--signal=TERM@120", "--open-mode=append",
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


IDENTITY = "samestep/run=web,samestep/project={},samestep/target=slurm,samestep/root={}"


@pytest.fixture
def queue(monkeypatch):
    """Slurm's queue."""
    fake = FakeSlurm()
    monkeypatch.setattr(slurm, "call", fake)
    monkeypatch.setenv("SAMESTEP_PROJECT", str(ROOT))
    return fake


def submission(*words):
    """The configuration and the manifest of a run ``web``."""
    given = ["cluster=slurm", *words]
    cfg = configured(*words, run_id="web")
    return cfg, render.render(cfg, given)


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("", f"the cluster has another job 76 of this name, since {SUBMITTED}, which is of no run"),
        (IDENTITY.format("other", "runs"), "job 76 of this name belongs to the run web of the pro"),
        (IDENTITY.format("project", "/x/runs"), "job 76 is a run of this name in /x/runs, not in "),
        # A relative folder is another one in each clone.
        (IDENTITY.format("project", "runs"), "job 76 is a run of this name in /other/runs, not in"),
    ],
)
def test_the_job_of_a_stranger_stays(queue, tmp_path, monkeypatch, comment, said):
    """Several jobs may have the name of the run, of which some are not the run's."""
    monkeypatch.chdir(tmp_path)
    queue.put("web", comment, folder="/other")
    cfg, manifests = submission()
    for action in slurm.ACTIONS.values():
        with pytest.raises(ConfigError, match=f"^web: {said}") as error:
            action(cfg, manifests)
        assert "choose another RUN_ID" in str(error.value)
    assert queue.done == []


def test_what_is_a_strangers_is_said_in_one_line(queue, tmp_path):
    queue.put("web")
    for action in ("submit", "cancel"):
        done = samestep(*line_of(action, "web", "cluster=slurm"), cwd=tmp_path, RUN_ID="web")
        assert done.returncode == 2
        assert "web: the cluster has another job 76" in done.stderr
        assert done.stderr.count("\n") == 1
    assert queue.done == []


def test_what_a_stranger_has_queued_and_ended_is_no_obstacle(queue, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    cfg, manifests = submission()
    queue.put("web", state="COMPLETED")
    assert slurm.submit(cfg, manifests) == 0
    # While the run is in the queue, another job of its name changes nothing.
    queue.put("web")
    capfd.readouterr()
    assert slurm.submit(cfg, manifests) == slurm.status(cfg, manifests) == 0
    assert slurm.cancel(cfg, manifests) == 0
    joined, state, cancelled = capfd.readouterr().out.splitlines()
    assert "job 77 is in the queue already" in joined
    assert state.startswith("web: job 77: RUNNING")
    assert cancelled == "web: cancelled; the same submit resumes it"
    assert queue.done == ["sbatch", "scancel 77"]
    assert [job["JobState"] for job in queue.jobs] == ["COMPLETED", "CANCELLED", "RUNNING"]


def test_a_run_is_the_same_with_other_overrides_and_from_another_clone(
    queue, tmp_path, monkeypatch
):
    for name in ("first", "clone"):
        (tmp_path / name).mkdir()
    root = f"run_root={tmp_path / 'runs'}"
    monkeypatch.chdir(tmp_path / "first")
    assert slurm.submit(*submission(root, "seed=1")) == 0
    monkeypatch.chdir(tmp_path / "clone")
    other = submission(root, "seed=2", "trainer.max_epochs=3")
    assert slurm.submit(*other) == slurm.cancel(*other) == slurm.submit(*other) == 0
    with pytest.raises(ConfigError, match=rf"in {tmp_path}/runs, not in {tmp_path}/clone/runs; "):
        slurm.cancel(*submission())
    monkeypatch.chdir(tmp_path)
    assert slurm.cancel(*submission()) == 0
    assert queue.done == ["sbatch", "scancel 76", "sbatch", "scancel 77"]


def test_every_job_of_a_name_is_the_runs_where_the_template_has_no_comment(queue):
    """A copy may have k8s/slurm.yaml of an earlier version."""
    cfg, manifests = submission()
    del manifests[0]["sbatch"]["comment"]
    queue.put("web", "mine")
    assert [job["JobId"] for job in slurm.find_own(cfg, manifests)] == ["76"]


def test_the_comment_of_a_job_cannot_be_replaced():
    done = launch("cluster=slurm", 'cluster.options=["--comment=mine"]', "--check", RUN_ID="web")
    assert done.returncode == 2
    assert "cluster.options: --comment=mine: must not replace the comment" in done.stderr
    assert "k8s/slurm.yaml" in done.stderr
