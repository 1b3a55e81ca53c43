"""A real Slurm of two nodes: runs are submitted, followed, stopped, preempted and continued."""

import re
import subprocess
import sys
from itertools import groupby

import pytest
import torch

from library.tests.programs import PATIENCE_S, until
from samestep.run import record
from tests import slurm
from tests.conftest import NO_PICTURES, QUICK, ROOT, environment, run
from tests.launching import line_of, samestep
from tests.samestep.sweep.test_search import states

pytestmark = pytest.mark.program

HERE = str(ROOT / "tests/samestep_here.py")
EVENTS = [  # before which step, and what happens
    "7 scancel --signal=TERM $SLURM_JOB_ID",
    "25 sbatch --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap=true",
]
EXPORTED = ["PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "MY_SETTING", "SAMESTEP_PROJECT"]
SLOW = ["+callbacks.slow._target_=labs.faults.saboteur.Slow", "+callbacks.slow.seconds=0.2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The variables of a running Slurm."""
    if missing := slurm.missing():
        pytest.skip(f"apt-get install munge slurm-client slurmctld slurmd ({missing})")
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


class Launcher:
    """``samestep launch`` for one run of this Slurm, with the interpreter of the tests."""

    def __init__(self, cluster, folder, run_id, *words):
        here = {"PYTHONPATH": f"{ROOT}:{ROOT}/src", "SAMESTEP_PROJECT": str(ROOT)}
        self.variables = {**cluster, "RUN_ID": run_id, **here}
        self.folder = folder  # the launcher remembers its runs below the folder it is called in
        self.words = [
            "cluster=slurm", f"cluster.entrypoint.none=[{sys.executable}]", "cluster.cpus=1",
            "cluster.memory=4G", f"cluster.export=[{','.join(EXPORTED)}]",
            f"run_root={folder}", "trainer.accelerator=cpu", *words,
        ]  # fmt: skip

    def __call__(self, action, *more, **variables):
        variables = {**self.variables, **variables}
        words = line_of(action, variables["RUN_ID"], *self.words, *more)
        if action == "logs":  # may wait for ever
            return run(HERE, *words, cwd=self.folder, timeout=900, **variables)
        return samestep(*words, cwd=self.folder, **variables)

    def follow(self):
        line = line_of("logs", self.variables["RUN_ID"], *self.words)
        return subprocess.Popen(
            [sys.executable, HERE, *line], cwd=self.folder,
            env=environment(**self.variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def wait_for(self, words):
        """Ask for the status until it has these words."""
        until(lambda: words in self("status").stdout, says=lambda: self("status").stdout, pause_s=1)


@pytest.fixture
def launcher(cluster, tmp_path):
    """Make a launcher; its run has ended when the test ends."""
    made = []

    def make(run_id, *words):
        made.append(Launcher(cluster, tmp_path, run_id, *words))
        return made[-1]

    yield make
    for one in made:
        one("cancel")


def weights(folder):
    return [torch.load(path) for path in sorted(folder.glob("weights-*.pt"))]


def test_a_run_that_is_stopped_and_preempted_is_bit_identical(launcher, tmp_path):
    """Two nodes; the job is queued again each time, and the weights are those of a quiet run."""
    recorder = "+callbacks.recorder"
    kept = [f"{recorder}._target_=tests.recorder.Recorder", f"{recorder}.dirpath={{}}"]
    caller = "+callbacks.caller"
    launch = launcher(
        "mine", *QUICK, "model=mlp", "trainer.num_nodes=2",
        *(word.format(tmp_path / "ours") for word in kept),
        f"{caller}._target_=tests.slurm.Caller",
        f"{caller}.events=[{','.join(repr(event) for event in EVENTS)}]",
    )  # fmt: skip
    submitted = launch("submit")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    assert submitted.stdout.startswith("Submitted batch job ")
    logs = launch("logs")
    assert logs.returncode == 0, logs.stdout + logs.stderr
    for words in ("node 0 of 2", "node 1 of 2", "Continuing: ", "Slurm (started again 2 times)"):
        assert words in logs.stdout
    for step in (8, 26):
        assert f"Stopped by SIGTERM after step {step}; saved" in logs.stdout
    assert "DUE TO PREEMPTION" in logs.stdout  # by a partition with a higher priority
    assert "Traceback" not in logs.stdout
    assert "COMPLETED, started again 2 times" in launch("status").stdout

    quiet = run(
        "train.py", *QUICK, "model=mlp", "trainer.devices=2", f"run_root={tmp_path}",
        *(word.format(tmp_path / "theirs") for word in kept), RUN_ID="quiet",
    )  # fmt: skip
    assert quiet.returncode == 0, quiet.stderr
    ours, theirs = weights(tmp_path / "ours"), weights(tmp_path / "theirs")
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_is_cancelled_saves_and_the_same_submit_continues_it(launcher):
    launch = launcher("mine", *QUICK, "model=mlp")
    assert launch("submit", *SLOW, "trainer.max_epochs=50").returncode == 0
    launch.wait_for("RUNNING, on ")
    other = launcher("other", "trainer.num_nodes=2", "cluster.entrypoint.none=[ls]")
    assert other("submit").returncode == 0
    other.wait_for("PENDING, Resources")
    with launch.follow() as logs:
        while not (line := logs.stdout.readline()).startswith("epoch 1/50"):
            assert line, logs.stderr.read()
        again = launch("submit", *SLOW, "trainer.max_epochs=50")
        assert "is in the queue already, nothing to do" in again.stdout
        cancelled = launch("cancel")
        assert cancelled.stdout == "mine: cancelled; the same submit resumes it\n"
        assert logs.wait(PATIENCE_S) == 1
        assert "Stopped by SIGTERM after step " in logs.stdout.read()
        assert "CANCELLED" in logs.stderr.read()
    assert launch("cancel").stdout == "mine: has ended, nothing to cancel\n"

    fast = ["+callbacks.slow.seconds=0", "allow_changes=[callbacks.slow.seconds]"]
    assert launch("submit", *SLOW[:1], *fast, "trainer.max_epochs=4").returncode == 0
    logs = launch("logs")
    assert logs.returncode == 0, logs.stdout + logs.stderr
    assert "Continuing: " in logs.stdout
    assert "mine: job " in (said := launch("status").stdout)
    assert ": COMPLETED\n  last line: " in said


def test_trials_of_a_sweep_get_the_named_variables_and_no_others(launcher):
    """``bash -c env`` takes the place of the entry point."""
    launch = launcher(
        "sweep", 'cluster.trials=["seed=1","seed=2"]',
        "cluster.entrypoint.none=[bash,-c,'env; for last; do true; done; echo LAST=$last']",
    )  # fmt: skip
    secrets = {"MY_TOKEN": "0123456789abcdef", "MY_SETTING": "a b"}
    assert launch("submit", **secrets).returncode == 0
    logs = launch("logs")
    assert logs.returncode == 0, logs.stdout + logs.stderr
    lines = logs.stdout.splitlines()
    for number, trial in enumerate(["seed=1", "seed=2"]):
        for words in (f"RUN_ID=sweep-{number}", f"LAST={trial}", "MY_SETTING=a b"):
            assert f"[{number}] {words}" in lines
    assert "MY_TOKEN" not in logs.stdout
    assert "sweep-1: job " in launch("status").stdout


def test_a_search_submits_its_trials_and_cancels_a_pruned_one(launcher, tmp_path):
    """Two trials at the same time: the one with the large batches is bad after its first epoch."""
    words = launcher("unused").words
    done = run(
        HERE, "sweep", "sweep=digits_lr", "n_trials=2", "trials_at_once=2",
        "pruner={_target_: optuna.pruners.ThresholdPruner, lower: 0.7}", *words,
        "+callbacks.bad._target_=tests.slurm.WaitsIfBad", "+callbacks.bad.accuracy=0.7",
        "model=mlp", "trainer.max_epochs=4", "report=false", NO_PICTURES,
        cwd=tmp_path, timeout=PATIENCE_S, **launcher("unused").variables | {"RUN_ID": "found"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "sweeps/found"
    assert {f"found-{n}": status for n, status in enumerate(states(folder))} == {
        "found-0": "PRUNED", "found-1": "COMPLETE",
    }  # fmt: skip
    pruned, complete = (record.read(tmp_path / f"found-{n}") for n in range(2))
    assert (pruned.state, pruned.why) == ("stopped", "pruned after validation 1")
    assert pruned.epoch < 4
    assert (complete.state, complete.epoch) == ("finished", 4)
    assert "found-0: cancelled" in (folder / "logs/found-0.log").read_text()


def test_the_runs_of_a_grid_are_submitted_and_followed(launcher, tmp_path):
    launch = launcher("unused")
    words = [
        str(ROOT / "train.py"), "-m", *launch.words, "model=mlp", *QUICK, NO_PICTURES, "seed=1,2",
        "trainer.limit_train_batches=2", "trainer.max_epochs=1",
    ]  # fmt: skip
    variables = launch.variables | {"RUN_ID": "grid"}

    def train(*more):
        done = run(*words, *more, cwd=tmp_path, timeout=PATIENCE_S, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    left = train()
    assert "grid-seed-1: submitted; 1 of 2 runs are left\n" in left
    assert "[grid-seed-2]   samestep logs grid-seed-2\n" in left
    # The jobs are in the queue, or have ended already.
    followed = train("grid.wait=true")
    assert "2 of 2 runs are finished" in followed or "grid-seed-2: finished; " in followed
    for number in (1, 2):
        assert record.read(tmp_path / f"grid-seed-{number}").state == "finished"
    assert "Grid grid: 2 of 2 runs are finished\n" in train("grid.wait=true")


def test_a_job_is_signalled_before_its_time_limit_and_queued_again(launcher):
    """A shell takes the place of the entry point; Slurm counts time limits in minutes."""
    # The limit comes when both nodes are ready for the signal, which is sent seconds later.
    shell = (
        "trap 'echo saved; exit 143' TERM; [ 0$SLURM_RESTART_COUNT -gt 0 ] && exit 0; "
        "touch ready-$SLURM_PROCID; until [ -e ready-0 -a -e ready-1 ]; do sleep 0.1; done; "
        "[ $SLURM_PROCID = 1 ] || scontrol update JobId=$SLURM_JOB_ID TimeLimit=4; "
        "while :; do sleep 0.1; done"
    )
    launch = launcher(
        "late", f'cluster.entrypoint.none=[bash,-c,"{shell}"]', "trainer.num_nodes=2",
        "cluster.grace_s=230",
    )  # fmt: skip
    assert launch("submit").returncode == 0
    logs = launch("logs")
    assert logs.returncode == 0, logs.stdout + logs.stderr
    assert logs.stdout.count("saved\n") == 2
    assert "DUE TO TIME LIMIT" not in logs.stdout
    assert "COMPLETED, started again 1 times" in launch("status").stdout


OWN_SCRIPT = """
import os, time
from pathlib import Path
from library.tests.kit import Net, batches
from samestep import Trainer

class Slow(Net):
    def training_step(self, batch, batch_idx):
        Path("steps").open("a").write(f"{self.global_step}\\n")
        # The job that was queued again has no time to lose.
        time.sleep(0 if int(os.environ.get("SLURM_RESTART_COUNT", 0)) else 0.2)
        return super().training_step(batch, batch_idx)

options = {"max_epochs": 40, "accelerator": "cpu", "enable_progress_bar": False, "devices": 1}
Trainer(run_dir="mine", enable_model_summary=False, **options).fit(Slow(), batches(64))
"""


def test_a_script_of_the_user_is_queued_again_by_sigusr1(cluster, tmp_path):
    """As Lightning's users write it; ``scancel`` sends what ``--signal`` sends before the limit."""
    (tmp_path / "script.py").write_text(OWN_SCRIPT)
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --signal=SIGUSR1@90 --requeue --open-mode=append --output=out\n"
        f"srun {sys.executable} script.py\n"
    )

    def call(*command):
        env = environment(**cluster)
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout

    job = call("sbatch", "--parsable", "job.sh").strip()
    steps = tmp_path / "steps"
    until(lambda: steps.exists() and len(steps.read_text().split()) > 3)
    call("scancel", "--signal=USR1", job)

    def shown():
        return call("scontrol", "show", "job", "--oneliner", job)

    until(lambda: "Restarts=1" in shown(), says=shown, pause_s=1)
    # A job that is queued again waits two minutes, unless it is told not to.
    call("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(
        lambda: "JobState=COMPLETED" in shown(),
        says=lambda: (tmp_path / "out").read_text(),
        pause_s=1,
    )
    said = (tmp_path / "out").read_text()
    assert "Stopped by SIGUSR1 after step " in said
    assert "Continuing: mine" in said
    assert "Traceback" not in said
    # None twice, but for the one that was computed once more when the run was stopped.
    taken = [int(step) for step, _ in groupby(steps.read_text().split())]
    assert taken == [*range(640)]


def test_a_job_that_fails_starts_again_but_not_with_a_wrong_configuration(launcher):
    for exit_code, said in (
        (3, "FAILED, exit code 3, started again 1 times"),
        (2, "FAILED, exit code 2"),
    ):
        fails = f"cluster.entrypoint.none=[bash,-c,'exit {exit_code}']"
        launch = launcher(f"fails-{exit_code}", fails, "cluster.restarts=1")
        assert launch("submit").returncode == 0
        assert launch("logs").returncode == 1
        assert said in launch("status").stdout


def test_slurm_is_asked_before_a_run_is_sent(launcher):
    launch = launcher("asked")
    accepted = launch("check")
    assert accepted.returncode == 0, accepted.stderr
    assert "Slurm would accept it: Job " in accepted.stdout
    for word, error in {
        "cluster.partition=nowhere": "invalid partition",
        "trainer.accelerator=gpu": "generic resource|gres",
    }.items():
        refused = launch("check", word)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
        assert re.search(error, refused.stderr.lower()), refused.stderr
    for command in ("status", "logs", "cancel"):
        missing = launch(command, RUN_ID="never-sent")
        assert (missing.returncode, missing.stdout) == (1, "")
        assert "Slurm has no job of yours with this name" in missing.stderr


@pytest.mark.program
def test_the_job_of_a_stranger_stays(launcher, cluster, tmp_path):
    """It has the name of the run, and another folder, no comment, or that of another project."""

    def call(*command, **options):
        env = environment(**cluster)
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=True, **options
        ).stdout

    def submit(*options):
        words = ("--parsable", "--job-name=web", "--output=/dev/null", "--wrap=sleep 1000")
        return call("sbatch", *words, *options, cwd="/").strip()

    identity = (
        "--comment=samestep/run=web,samestep/project={},samestep/target=slurm,samestep/root={}"
    )
    others = [
        submit(), submit("--hold", "--array=0-1"), submit(identity.format("other", tmp_path)),
        submit("--hold", identity.format("project", "/elsewhere")),
    ]  # fmt: skip

    def shown():
        jobs = call("squeue", "--me", "--name=web", "--noheader", "--format=%F %T").splitlines()
        return {job for job in jobs if job.split()[0] in others}

    running = {f"{others[0]} RUNNING", f"{others[2]} RUNNING"}
    until(lambda: running <= shown(), says=lambda: str(shown()), pause_s=1)
    before = shown()
    launch = launcher("web", "cluster.entrypoint.none=[bash,-c,'sleep 1000']")
    for action in ("submit", "check", "status", "logs", "cancel"):
        done = launch(action)
        assert done.returncode == 2, done.stdout + done.stderr
        assert re.search(r"^error: web: .*job \d+ .*choose another RUN_ID", done.stderr)
        assert done.stderr.count("\n") == 1
    assert shown() == before
    # A job of the run beside them is found, joined and ended.
    call("scancel", *others)
    until(lambda: not shown(), says=lambda: str(shown()), pause_s=1)
    assert launch("submit").returncode == 0
    others[:] = [submit()]
    before = shown()
    assert "is in the queue already" in launch("submit", "seed=7").stdout
    assert launch("status").stdout.startswith("web: job ")
    assert launch("cancel", "seed=7").stdout == "web: cancelled; the same submit resumes it\n"
    until(lambda: f"{others[0]} RUNNING" in shown(), says=lambda: str(shown()), pause_s=1)
    assert launch("cancel").stdout == "web: has ended, nothing to cancel\n"
    call("scancel", *others)
    until(lambda: not shown(), says=lambda: str(shown()), pause_s=1)
