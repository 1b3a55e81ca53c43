"""Valid values of keys whose type says too little: ranges, choices, formats. Imports no torch.

These are the rules of all keys that ``samestep`` defines: of the run, the trainer, the cluster and
the shipped callbacks, and of ``data``. What a constructor of the project rejects is an error too.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.rule import (
    ABOVE_0,
    BETWEEN_0_AND_1,
    BOOL,
    MAPPING,
    NODE,
    NULL,
    STRING,
    TEXT,
    Rule,
    each,
    matching,
    number,
    one_of,
    some,
    whole,
)
from samestep.run_spec import KNOWN_DIFFERENCES

# Lightning takes an int as a number of batches, and a float as a fraction of them.
FRACTION = number("a fraction from 0.0 to 1.0", lambda v: 0 <= v <= 1)
BATCHES = NULL | whole(0) | FRACTION
SOME_BATCHES = NULL | whole(1) | number("a fraction above 0.0, up to 1.0", lambda v: 0 < v <= 1)
# 63 characters: the limit of Kubernetes. A name is also a directory, and a part of a URL.
NAME = matching(
    f"at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit, and {STRING}",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
)
COUNTS = some("a list of whole numbers, each at least 1", whole(1))
SHARES = some("a list of numbers above 0", ABOVE_0)
# Units of Kubernetes (16Gi) and of Docker (16gb).
SIZE = Rule(
    "a size, such as 512Mi or 16Gi",
    lambda v: bool(re.fullmatch(r"(\d+\.?\d*|\.\d+)([kmg]b?|[KMGTPE]i?)?", str(v))),
)
# In Kubernetes 500m is half a core.
CPUS = Rule("text such as 500m", lambda v: bool(re.fullmatch(r"[1-9]\d*m?", str(v))))
# Lightning's value for no limit.
NO_LIMIT = Rule("-1 (no limit)", whole(-1, -1).holds)
# No numbers of GPUs: a cluster numbers those of each node itself.
DEVICES = Rule(
    "auto or a whole number at least 1 (CUDA_VISIBLE_DEVICES=1,3 chooses GPUs)",
    (one_of("auto") | whole(1)).holds,
    ("auto",),
)
DURATION = matching(
    "text such as 00:12:00:00, which is days:hours:minutes:seconds", r"\d+:\d\d:\d\d:\d\d"
)
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true")

OF_RUN = {
    "seed": whole(0, 2**32 - 1),  # NumPy accepts no larger one
    "run_id": NULL | NAME,
    "run_root": TEXT,
    "run_dir": TEXT,
    "allow_changes": each(TEXT),
    "notes": NULL | TEXT,
    "tags": each(TEXT),
}
# Flags of Lightning that samestep sets itself, or that would break its guarantees.
FORBIDDEN = {
    "callbacks": "add a callback with +callbacks.NAME._target_=CLASS",
    "logger": "choose trackers with logger=NAME",
    "plugins": "samestep sets its own, for checkpoints and ranks",
    "default_root_dir": "a run writes to run_dir",
    "enable_checkpointing": "a run continues from its checkpoints",
    "enable_progress_bar": "callbacks.progress shows the progress",
    "enable_model_summary": "samestep has disabled it",
    "use_distributed_sampler": "each rank always gets its slice of the data",
    "overfit_batches": "it replaces the order of the data; use debug=overfit",
    "reload_dataloaders_every_n_epochs": "an interrupted epoch needs its loader",
    "barebones": "a run needs its callbacks and its history",
    "model_registry": "it is for Lightning's own platform",
}
OF_TRAINER = {
    "trainer.accelerator": one_of("auto", "cpu", "gpu", "mps", "tpu"),
    "trainer.devices": DEVICES,
    "trainer.num_nodes": whole(1),
    "trainer.strategy": one_of("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp") | NODE,
    "trainer.precision": one_of(*PRECISIONS),
    "trainer.max_epochs": whole(1) | NO_LIMIT,
    "trainer.min_epochs": NULL | whole(1),
    "trainer.max_steps": whole(1) | NO_LIMIT,
    "trainer.max_time": NULL | DURATION,
    "trainer.accumulate_grad_batches": whole(1),
    "trainer.gradient_clip_val": NULL | ABOVE_0,
    "trainer.check_val_every_n_epoch": whole(1),
    "trainer.val_check_interval": NULL | whole(1) | number("up to 1.0", lambda v: 0 < v <= 1),
    "trainer.num_sanity_val_steps": NULL | whole(0) | NO_LIMIT,
    "trainer.limit_train_batches": SOME_BATCHES,
    "trainer.limit_val_batches": BATCHES,
    "trainer.limit_test_batches": BATCHES,
    "trainer.fast_dev_run": BOOL | whole(1),
    "trainer.log_every_n_steps": whole(1),
    "trainer.profiler": NULL | one_of("simple", "advanced", "pytorch") | NODE,
    "trainer.deterministic": NULL | BOOL | one_of("warn"),
    # Ours: ``batch_size`` of ordinary DataLoaders counts all ranks, and notes that are not printed.
    "trainer.split_batches": BOOL,
    "trainer.virtual_ranks": NULL | whole(1),
    "trainer.allow": each(one_of(*KNOWN_DIFFERENCES)),
    # Lightning's other flags. They are rarely needed, and therefore not in configs/trainer.
    "trainer.min_steps": NULL | whole(1),
    "trainer.gradient_clip_algorithm": NULL | one_of("norm", "value"),
    "trainer.limit_predict_batches": BATCHES,
    "trainer.detect_anomaly": BOOL,
    "trainer.benchmark": NULL | BOOL,
    "trainer.inference_mode": BOOL,
    "trainer.enable_autolog_hparams": BOOL,
    **{
        f"trainer.{name}": Rule(f"left out: {why}", lambda v: False)
        for name, why in FORBIDDEN.items()
    },
}
OF_CLUSTER = {
    "cluster.timeout_s": ABOVE_0,
    "cluster.shares": one_of("equal", "auto") | SHARES,
    "cluster.join_timeout_s": whole(1),
    "cluster.shutdown_s": whole(1),
    "cluster.grace_s": whole(1),
    "cluster.ttl_s": NULL | whole(1),
    "cluster.max_restarts": whole(0),
    "cluster.backoff_limit": whole(0),
    "cluster.min_nodes": whole(1),
    "cluster.max_nodes": whole(1),
    "cluster.devices_per_node": COUNTS,
    "cluster.cpus": whole(1) | CPUS,
    "cluster.memory": NULL | SIZE,
    "cluster.shm": SIZE,
    "cluster.user": NULL | whole(1),
    "cluster.namespace": NULL | TEXT,
    "cluster.queue": NULL | TEXT,
    "cluster.queue_priority": NULL | TEXT,
    "cluster.priority_class": NULL | TEXT,
    "cluster.volume": NULL | TEXT,
    "cluster.volume_size": NULL | TEXT,
    "cluster.storage_class": NULL | TEXT,
    "cluster.access_mode": one_of("ReadWriteMany", "ReadWriteOnce"),
    "cluster.pod_patch": NULL | MAPPING,
    "cluster.job_patch": NULL | MAPPING,
    "cluster.pull_secret": NULL | TEXT,
    "cluster.image_pull_policy": one_of("IfNotPresent", "Always", "Never"),
    "cluster.cli": one_of("v2", "v1"),
    "cluster.restarts": whole(0),
    "cluster.time": NULL | TEXT | whole(1),
    "cluster.partition": NULL | TEXT,
    "cluster.account": NULL | TEXT,
    "cluster.trials": each(TEXT),
    "cluster.export": each(TEXT),
}
OF_CALLBACKS = {
    "callbacks.checkpoints.monitor": NULL | TEXT,
    "callbacks.checkpoints.mode": one_of("min", "max"),
    "callbacks.checkpoints.every_s": one_of("auto") | ABOVE_0,
    "callbacks.checkpoints.every_n_epochs": NULL | whole(1),
    "callbacks.artifacts.url": NULL | TEXT,
    "callbacks.artifacts.flush_timeout_s": ABOVE_0,
    "callbacks.loss_guard.max_skipped": whole(0),
    "callbacks.progress.log_every_s": ABOVE_0,
    "callbacks.early_stopping.mode": one_of("min", "max"),
    "callbacks.early_stopping.patience": whole(0),
    "callbacks.ema.decay": BETWEEN_0_AND_1,
}
# Other callbacks, loggers, models and data check their own arguments.
OF_DATA = {"data.global_batch_size": whole(1), "data.shuffle": BOOL | NODE}
RULES: dict[str, Rule] = OF_RUN | OF_DATA | OF_TRAINER | OF_CLUSTER | OF_CALLBACKS


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """A line for each conflict between values that are valid by themselves."""
    # Only Slurm has several.
    entrypoints = cfg.cluster.get("entrypoint", {})
    if entrypoints and cfg.cluster.container not in entrypoints:
        yield f"cluster.container={cfg.cluster.container}: must be one of {', '.join(entrypoints)}"
    yield from _unknown_data_keys(cfg)
    for name, node in cfg.callbacks.items():
        if _maximizes_loss(node):
            yield (
                f"callbacks.{name}.mode=max: a lower callbacks.{name}.monitor={node.monitor} is "
                f"better; set callbacks.{name}.mode=min"
            )
    if Path.cwd().is_relative_to(Path(cfg.run_dir).resolve()):
        yield (
            f"run_dir={cfg.run_dir}: must be a directory of its own, and not one that the current "
            "directory is in, because a run may empty it; choose the name by RUN_ID and the place "
            "by run_root"
        )


def _maximizes_loss(callback: DictConfig) -> bool:
    """Whether a callback takes the highest loss or error for the best one."""
    if callback.get("mode") != "max":
        return False
    # Early stopping refers to both keys of the checkpoints, which have their own line.
    if all(OmegaConf.is_interpolation(callback, key) for key in ("monitor", "mode")):
        return False
    words = re.findall("[a-z]+", str(callback.get("monitor")).lower())
    return not {"loss", "error"}.isdisjoint(words)


def _unknown_data_keys(cfg: DictConfig) -> Iterator[str]:
    """Keys of the data that the model refers to, and that these data do not have."""
    text = str(OmegaConf.to_container(cfg.model))
    names = dict.fromkeys(re.findall(r"\$\{data\.(\w+)", text))
    missing = [f"data.{name}" for name in names if name not in cfg.data]
    if missing:
        yield (
            f"{cfg.model.get('_target_')} needs {', '.join(missing)}, which "
            f"{cfg.data.get('_target_', 'data=null')} does not have; choose data and a model of "
            "one task"
        )
