"""Train and test one model.

python train.py                                     # handwritten digits on this machine
python train.py data=cifar10 model=resnet18
python train.py cluster=k8s trainer.devices=2       # two processes
torchrun --standalone --nproc-per-node=2 train.py cluster=k8s
python train.py --help

Torch is imported where training begins: help and errors answer before.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from samestep.config.compose import CONFIGS, check, flags_of, help_text
from samestep.config.rules import RULES
from samestep.errors import ConfigError
from samestep.launch import agent
from samestep.ranks import environment, failure, process


def train(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Fit the model that ``cfg`` describes, test its best checkpoint, and write the results.

    A run whose directory holds a checkpoint continues from it; a finished one is left alone.

    Args:
        cfg: the composed ``configs/train.yaml``; its ``run_id`` is set.
        overrides: what made it from the defaults, for the records.

    Returns:
        The final figures, as in ``metrics.json``: ``{"test/accuracy": 0.98, ...}``; on ranks
        other than zero, and for a run that was finished before, an empty dictionary.

    Raises:
        ConfigError: if the configuration cannot be run; nothing was changed then.
        DataError: if the images are missing or damaged.
    """
    import lightning as L

    from samestep import build
    from samestep.ranks import preflight, stopping
    from samestep.ranks import process_group as distributed
    from samestep.run import artifacts
    from samestep.run import directory as run
    from samestep.run.history import History
    from samestep.run.records import log_to_files

    started = time.monotonic()
    stopping.install()
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    build.check(cfg)
    model, datamodule = build.model(cfg), build.datamodule(cfg)
    datamodule.check_batch_size(environment.world_size(), cfg.trainer.accumulate_grad_batches)
    preflight.find_rank_zero(cfg)
    with distributed.process_group(cfg):
        cfg.run_id = distributed.from_rank_zero(str, cfg.run_id)  # each may have made up its own
        preflight.run(cfg, model, datamodule)
        state = distributed.from_rank_zero(run.begin, cfg, ["train.py", *overrides])
        if state.finished:
            return {}
        log_to_files(Path(cfg.run_dir))
        history = History(cfg.run_dir)
        trainer = build.trainer(cfg, history)

        try:
            trainer.fit(model, datamodule, ckpt_path=state.ckpt_path)
            trainer.test(model, datamodule, ckpt_path=run.best_checkpoint(cfg), verbose=False)

            tested = {name: value.item() for name, value in trainer.callback_metrics.items()}
            if not trainer.is_global_zero:
                return {}
            return run.finish(cfg, history.last() | tested, seconds=time.monotonic() - started)
        finally:
            artifacts.flush(trainer)


def main() -> int:
    """Check the command line; then train in this process, or start one for each device.

    Returns:
        0 finished, 1 error, 2 wrong usage or config, 143 stopped by SIGTERM, 130 by Ctrl-C.
    """
    try:
        flags = flags_of(sys.argv[1:])
        if flags.help:
            print(help_text())
            return 0
        cfg = check(flags.overrides, multirun=flags.multirun)
        only_looks = flags.hydra_help or flags.cfg or flags.info
        if not (only_looks or flags.shell_completion):
            num_processes = agent.num_processes(cfg)
            if num_processes > 1 and flags.multirun:
                raise ConfigError(
                    "-m: trains one process per run; for several, write a loop in your shell: "
                    f"for seed in 1 2 3; do python train.py trainer.devices={num_processes} "
                    "seed=$seed ...; done"
                )
            if num_processes > 1:
                return agent.start(sys.argv[1:], num_processes, run_id=name_of(cfg))
        environment.limit_threads()
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(task)()
    except ConfigError as error:
        error.on_all_ranks = True  # one command has started them all
        return fail(error, exit_code=2)
    return 0


def task(cfg: DictConfig) -> None:
    """Train what Hydra composed: the whole program, or one run of a sweep."""
    hydra_config = HydraConfig.get()
    try:
        cfg.run_id = name_of(cfg)
        if hydra_config.mode is RunMode.MULTIRUN:
            cfg.run_id += f"-{hydra_config.job.num}"
        train(cfg, hydra_config.overrides.task)
    except ConfigError as error:
        sys.exit(fail(error, exit_code=2))
    except Exception as error:
        sys.exit(fail(error, exit_code=1))


def name_of(cfg: DictConfig) -> str:
    """The run's name: the one it was given, or a new one such as ``digits-cnn-3f2a1b``."""
    kinds = [str(node._target_).rpartition(".")[2] for node in (cfg.data.source, cfg.model.net)]
    name = cfg.run_id or environment.run_id() or environment.new_run_id(*kinds)
    if not RULES["run_id"].holds(name):
        raise ConfigError(
            f"RUN_ID={name}: must be at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return str(name)


def fail(error: Exception, *, exit_code: int) -> int:
    """Tell the user, and torchrun's agent, what is wrong."""
    failure.report(error)
    return exit_code


if __name__ == "__main__":
    process.run(main, interrupt_at_once=True)
