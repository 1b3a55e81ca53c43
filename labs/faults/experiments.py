"""The faults, and the table of what became of them."""

import shutil
from pathlib import Path
from typing import Any

from labs import pages
from labs.faults.lab import (
    ETCD,
    OWN_FOLDERS,
    PODS,
    PODS_THAT_RESTART,
    ROOT,
    S3,
    Experiment,
    Outcome,
    cut,
    flip,
)

TABLE = ROOT / "labs/faults/results.md"
ONE, TWO, TORCHRUN = "1 process", "2 processes", "torchrun 2"
RESTARTS, AGENTS, UNEQUAL = "torchrun 2, restarts", "agents 1+1", "agents 1+2"
STOPPED = {ONE: (143,), TWO: (143,), PODS: (143,)}  # torchrun makes every exit code 1


def terminated(name: str, topology: str, *faults: str, **options: Any) -> Experiment:
    """A run that must stop by itself, with a checkpoint, and repeat nothing."""
    codes = STOPPED.get(topology, (1,))
    return Experiment(name, topology, list(faults), exit_codes=codes, **options)


def killed(name: str, topology: str, *faults: str, **options: Any) -> Experiment:
    return Experiment(name, topology, list(faults), **options)


def lose_both(run_dir: Path) -> None:
    """Remove the run from both nodes; its copy is elsewhere."""
    for folder in (run_dir, run_dir.parent / "node-1" / run_dir.name):
        shutil.rmtree(folder)


def newest_shards(run_dir: Path) -> Path:
    """The shards of last.ckpt."""
    return max(run_dir.glob("checkpoints/shards-*"), key=lambda path: int(path.name.split("-")[1]))


SHARDED = ["trainer.strategy=fsdp"]
MINUTE = "cluster.timeout_s=8"
SLOW = [  # an orphan looks for its agent once a second
    "+callbacks.slow._target_=labs.faults.saboteur.SlowOnceHarmed",
    "+callbacks.slow.seconds=0.3",
]
IN_PLACE: dict[str, Any] = {"max_attempts": 1, "exit_codes": (0,)}
LANCE = [
    "data=lance", "data.num_classes=10", "data.num_channels=1", "data.image_size=8",
    "data.mean=[0.3]", "data.std=[0.4]", "data.flip=false", "data.num_threads=1",
    "data.storage_options={timeout:'4s'}",
]  # fmt: skip


def store_fails(name: str, fault: str, **options: Any) -> Experiment:
    return Experiment(name, S3, [f"{fault} step 5 0"], LANCE, **(IN_PLACE | options))


ENDED = {"max_attempts": 2, "exit_codes": (1,)}
EXPERIMENTS = [
    terminated("SIGTERM before the first step", ONE, "term start 0 0"),
    terminated("SIGTERM at the first step", ONE, "term step 0 0"),
    terminated("SIGTERM within a step", ONE, "term backward 27 0"),
    terminated("SIGTERM during validation", ONE, "term val 40 0"),
    terminated("SIGTERM during a save", ONE, "term save 8 0"),
    Experiment("SIGTERM during a test", ONE, ["term test 60 0"], exit_codes=(0, 143)),
    terminated("SIGTERM twice", ONE, "term_twice step 33 0"),
    terminated("SIGTERM while the loader is blocked", ONE, "sleep_then_term load 27 0"),
    terminated("SIGTERM twice in a run, with EMA", ONE, "term step 7 0", "term step 33 0",
               overrides=["callbacks=ema"]),
    terminated("SIGTERM, early stopping", ONE, "term step 27 0",
               overrides=["callbacks=early_stopping", "callbacks.early_stopping.patience=1",
                          "+callbacks.early_stopping.min_delta=1.0"]),
    terminated("SIGTERM while accumulating gradients", ONE, "term backward 27 0",
               overrides=["trainer.accumulate_grad_batches=3"]),
    terminated("SIGTERM, validation within the epoch", ONE, "term step_end 30 0",
               overrides=["trainer.val_check_interval=5"]),
    Experiment("SIGINT (Ctrl-C)", ONE, ["interrupt step 27 0"], exit_codes=(130,)),
    Experiment("SIGINT (Ctrl-C) to all", TWO, ["int_agent step 27 0"], exit_codes=(130,)),
    terminated("SIGTERM to one rank", TWO, "term step 27 1"),
    terminated("SIGTERM to all", TWO, "term_agent backward 27 1"),
    terminated("SIGTERM to one rank during validation", TWO, "term val 40 1"),
    terminated("SIGTERM to one rank, its loader blocked", TWO, "sleep_then_term load 27 1"),
    terminated("SIGTERM before the first step", TWO, "term start 0 1"),
    terminated("SIGTERM to the agent", TORCHRUN, "term_agent step 27 0"),
    terminated("SIGTERM to one of two agents", AGENTS, "term_agent step 27 1"),
    terminated("SIGTERM to the first of two agents", AGENTS, "term_agent step 27 0"),
    terminated("SIGTERM to the larger agent", UNEQUAL, "term_agent step 27 1",
               overrides=["trainer.deterministic=true"]),
    terminated("SIGTERM to one of two agents", OWN_FOLDERS, "term_agent step 27 1"),
    killed("SIGKILL of rank 0 within a step", OWN_FOLDERS, "kill backward 27 0"),
    killed("both folders lost, a store", OWN_FOLDERS, "kill step 27 0", "term_agent step 47 0",
           damage=lose_both, damaged_attempt=2,
           overrides=["callbacks.artifacts.url=${run_root}/store"]),
    terminated("node 0's folder lost, no store", OWN_FOLDERS,
               "term_agent step 27 0", "kill step 47 0", damage=shutil.rmtree, damaged_attempt=2,
               says="is on the node of rank 1: rank zero fetches it"),
    terminated("SIGTERM to a pod", PODS, "term_pod step 27 1"),
    terminated("SIGTERM to the pod of rank 0", PODS, "term_pod backward 27 0"),
    killed("SIGKILL", ONE, "kill step 27 0"),
    killed("SIGKILL while writing a checkpoint", ONE, "kill save 8 0"),
    killed("SIGKILL before a checkpoint's rename", ONE, "kill rename 9 0"),
    killed("SIGKILL of rank 1 within a step", TWO, "kill backward 27 1"),
    killed("SIGKILL of rank 0 within a step", TORCHRUN, "kill backward 27 0"),
    killed("SIGKILL of rank 1 during validation", TORCHRUN, "kill val 40 1"),
    killed("SIGKILL of the agent", TORCHRUN, "kill_agent step 27 0", overrides=SLOW),
    killed("SIGKILL of one of two agents", AGENTS, "kill_agent step 27 1", overrides=SLOW),
    killed("SIGKILL of the agent in a pod", PODS, "kill_agent step 27 1", overrides=SLOW),
    killed("SIGKILL of a rank in a pod", PODS, "kill backward 27 0"),
    killed("SIGKILL of a rank of the larger node", UNEQUAL, "kill backward 27 2",
           overrides=["trainer.deterministic=true"]),
    killed("SIGKILL of rank 1, restarted in place", RESTARTS, "kill step 27 1", max_attempts=1),
    killed("SIGKILL of rank 0, restarted in place", RESTARTS, "kill backward 31 0", max_attempts=1),
    killed("exception on one rank", TWO, "error step 27 1", says="planted error"),
    killed("exit without a word", TORCHRUN, "exit backward 27 1"),
    killed("SIGSTOP of one rank", TWO, "hang step 27 1", overrides=[MINUTE], logs=(0,)),
    killed("SIGSTOP in another pod", PODS_THAT_RESTART, "hang step 27 1", exit_codes=(0,),
           overrides=["cluster.timeout_s=30"], says="no progress for", logs=(0,), max_attempts=1),
    killed("a rank waits forever", TORCHRUN, "sleep backward 27 1", overrides=[MINUTE],
           logs=(0, 1)),
    killed("a step never ends", ONE, "sleep backward 27 0", overrides=[MINUTE], logs=(0,)),
    killed("etcd restarted empty", ETCD, "lose_etcd step 27 0", overrides=SLOW, **IN_PLACE),
    killed("etcd away for a minute", ETCD, "lose_etcd_for_a_minute step 3 0",
           overrides=[*SLOW, "callbacks.slow.seconds=1.3"], **IN_PLACE),
    killed("etcd away for a minute, a rank killed meanwhile", ETCD,
           "lose_etcd_for_a_minute step 27 0", "kill step 31 1", overrides=SLOW, **IN_PLACE),
    killed("loss is nan", ONE, "nan step 27 0", exit_codes=(1,),
           says="step 28: the loss on rank 0"),
    killed("loss is nan on one rank", TWO, "nan step 27 1", exit_codes=(1,),
           says="step 28: the loss on rank 1"),
    killed("a bit of last.ckpt flips", ONE, "kill step 47 0", damage=flip("last.ckpt"),
           says="Damaged or misplaced checkpoints"),
    killed("last.ckpt is cut", ONE, "kill step 47 0", damage=cut("last.ckpt", 0.5),
           says="Damaged or misplaced checkpoints"),
    killed("last.ckpt is empty", ONE, "kill step 47 0", damage=cut("last.ckpt", 0),
           says="Damaged or misplaced checkpoints"),
    killed("last.ckpt is deleted", ONE, "kill step 47 0",
           damage=lambda run_dir: (run_dir / "checkpoints/last.ckpt").unlink()),
    terminated("SIGTERM to one rank, sharded", TWO, "term step 27 1", overrides=SHARDED),
    killed("SIGKILL of rank 1 before its shard's rename", TWO, "kill rename 2 1",
           overrides=SHARDED),
    killed("a shard is cut", TWO, "kill step 47 0", damage=lambda run_dir: cut(
        f"{newest_shards(run_dir).name}/1.shard", 0.5)(run_dir), overrides=SHARDED,
           says="Damaged or misplaced checkpoints"),
    store_fails("every other request: 503", "store_503"),
    store_fails("every other request: 500", "store_500"),
    store_fails("every other request: connection closed", "store_closes"),
    store_fails("each request takes 0.3 s more", "store_is_slow"),
    store_fails("every eighth request hangs", "store_hangs"),
    store_fails("the store is away for 20 s", "store_restarts"),
    store_fails("the store is away for longer than the run waits", "store_is_away", **ENDED,
                says="cannot be read"),
    store_fails("files of a table are missing", "store_misses", **ENDED, says="cannot be read"),
    store_fails("files of a table have changed", "store_changes", **ENDED, says="is damaged"),
    terminated("SIGTERM at each of 16 steps", ONE, *(f"term step {n} 0" for n in range(16)),
               overrides=["trainer.limit_train_batches=8", "trainer.max_epochs=2", "callbacks=ema"],
               max_attempts=17),
    *(killed("5 x SIGKILL, and where the time went", topology,
             *(f"kill step {n} 0" for n in (7, 23, 31, 38, 47)), max_attempts=6,
             has_exact_time=True) for topology in (ONE, TWO)),
    killed("20 x SIGKILL of a rank, restarted in place", RESTARTS,
           *(f"kill {'step' if n % 2 else 'backward'} {2 * n + 5} {n % 2}" for n in range(20)),
           max_attempts=1),
    killed("20 x SIGTERM to one of two agents", AGENTS,
           *(f"term_agent {'step' if n % 2 else 'backward'} {2 * n + 5} {n % 2}"
             for n in range(20)), max_attempts=21),
]  # fmt: skip


def note(experiment: Experiment, outcome: Outcome) -> None:
    """Put a result into the table of labs/faults/results.md, in the order of ``EXPERIMENTS``."""
    rows = {}
    for line in pages.read_table(TABLE.read_text()).splitlines()[2:]:  # below the headings
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        rows[cells[0], cells[1]] = cells
    result = "yes" if outcome.survived else f"**no**: {outcome.why}"
    seconds = f"{outcome.resume_s:.0f}" if outcome.resume_s else ""
    key = experiment.name, experiment.topology
    rows[key] = [*key, result, str(outcome.attempts), seconds, str(outcome.steps_repeated)]
    lines = [
        "| fault | where | survived | attempts | seconds to the next step | steps repeated |",
        "|---|---|---|---|---|---|",
    ]
    # Rows of experiments that are gone are dropped here.
    for known in EXPERIMENTS:
        if row := rows.get((known.name, known.topology)):
            lines.append(f"| {' | '.join(row)} |")
    pages.write_table(TABLE, "\n".join([*lines, ""]))
