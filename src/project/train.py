"""Train and test one model.

python train.py                                     # the default run, on this machine
python train.py trainer.max_epochs=5 seed=1         # other values
python train.py trainer.devices=2                   # two processes, with or without GPUs
torchrun --standalone --nproc-per-node=2 train.py
python train.py --help

Torch is imported where training begins: help and errors answer before.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.hydra.adapter import topology_of
from samestep.hydra.compose import check, help_text, rewrite_overrides
from samestep.hydra.flags import flags_of
from samestep.hydra.folder import configs_folder, project_folder
from samestep.hydra.name import name_run
from samestep.node import agent
from samestep.ranks import environment, failure, process

KEEPS_NOTHING = "trainer.fast_dev_run keeps no results; the name is free"
NOTHING_TO_DO = "Nothing to do, the run is finished. RUN_ID=<another name> begins a new one."


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
        RunError: if the data are missing or damaged, or the run cannot go on.
    """
    import lightning as L

    from samestep import ending
    from samestep.hydra import build
    from samestep.hydra.adapter import spec_of
    from samestep.ranks import preflight, process_group, stopping
    from samestep.report import page
    from samestep.run import artifacts, nodes, summary
    from samestep.run import directory as run
    from samestep.run.logs import log_to_files, mute_lightning

    started = time.monotonic()
    stopping.install()
    mute_lightning()
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    accelerator, timeout_s = cfg.trainer.accelerator, cfg.cluster.timeout_s
    preflight.find_rank_zero(accelerator, timeout_s)
    with process_group.process_group(accelerator, timeout_s):
        cfg.run_id = process_group.broadcast(cfg.run_id)  # each rank may have made up its own

        # Everything is built before the run directory is opened: a configuration that cannot be
        # run leaves nothing behind, and changes nothing in a run that exists.
        model, datamodule, trainer, history = build.everything(cfg)
        spec = spec_of(cfg, overrides)
        preflight.run(spec, model, datamodule)
        state = nodes.begin(spec, ["train.py", *overrides], copies=artifacts.url_of(trainer))
        if state.finished:
            if trainer.is_global_zero:
                print(NOTHING_TO_DO, summary.summarize(spec.run_dir), sep="\n", flush=True)
            return {}
        again = summary.command_to_go_on(spec.config, spec.run_dir, None)
        report = page.write_or_warn if cfg.report else None
        with (
            ending.recorded(spec, trainer, again=again, report=report),
            build.refusals("trainer"),
            run.full_disk_is_one_message(spec.run_dir),
        ):
            log_to_files(spec.run_dir)
            trainer.loggers = [*build.loggers(cfg), history]  # a module sees the first
            trainer.fit(model, datamodule, ckpt_path=state.ckpt_path)
            tested: dict[str, float] = {}
            if build.has_test(model, datamodule):
                best = nodes.best_checkpoint(spec)
                if best is None and trainer.is_global_zero and not spec.saves_nothing:
                    print("Note: no epoch was the best one, so the last weights are tested")
                trainer.test(model, datamodule, ckpt_path=best, verbose=False)
                tested = {name: v.item() for name, v in trainer.callback_metrics.items()}
            elif trainer.is_global_zero:
                print("Note: there is no test_step or no test_dataloader, so nothing is tested")

            if not trainer.is_global_zero:
                return {}
            figures = history.last() | tested
            run.finish(spec, figures)
            if spec.saves_nothing:
                print(f"Finished: {spec.run_dir}: {KEEPS_NOTHING}", flush=True)
                return figures
            print(summary.summarize(spec.run_dir, time.monotonic() - started), flush=True)
            return figures


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
        if needs_hydra(flags):
            return run_with_hydra(flags)
        cfg = check(flags.overrides)
        cfg.run_id = name_run(cfg)
        num_processes = agent.num_processes(*topology_of(cfg))
        if num_processes > 1:
            program = [str(project_folder() / "train.py"), *flags.overrides]
            return agent.start(program, num_processes, run_id=cfg.run_id)
    except ConfigError as error:
        error.on_all_ranks = True  # one command has started all ranks
        return failure.report(error)
    return train_or_report(cfg, flags.overrides)


def train_or_report(cfg: DictConfig, overrides: Sequence[str]) -> int:
    """Train, and report an error to the user and to torchrun. Returns the exit code."""
    environment.limit_threads()
    try:
        train(cfg, overrides)
    except Exception as error:
        return failure.report(error)
    return 0


def needs_hydra(flags: Namespace) -> bool:
    """Whether Hydra's own program must run: for sweeps, for its flags and its own settings."""
    only_shows = flags.cfg or flags.info or flags.hydra_help or flags.shell_completion
    own_settings = any(word.lstrip("+~").startswith("hydra") for word in flags.overrides)
    return bool(only_shows or flags.multirun or own_settings)


def run_with_hydra(flags: Namespace) -> int:
    """Check the overrides, and hand them to Hydra, which calls ``train_for_hydra``."""
    if not flags.shell_completion:  # its words are no overrides
        cfg = check(flags.overrides, multirun=flags.multirun)
        if not (flags.cfg or flags.info or flags.hydra_help):
            refuse_several_processes(cfg, "-m" if flags.multirun else "hydra.*")
        # Hydra must compose what has been checked.
        words = [word for word in sys.argv[1:] if word not in flags.overrides]
        sys.argv[1:] = [*words, *rewrite_overrides(flags.overrides)]
    main_of_hydra = hydra.main(
        version_base="1.3", config_path=str(configs_folder()), config_name="train"
    )
    main_of_hydra(train_for_hydra)()
    return 0


def refuse_several_processes(cfg: DictConfig, asked: str) -> None:
    """Raise a ConfigError if the run needs several processes, which Hydra does not start."""
    num_processes = agent.num_processes(*topology_of(cfg))
    if num_processes > 1:
        raise ConfigError(
            f"{asked}: trains one process per run; for several, write a loop in your shell: "
            f"for seed in 1 2 3; do python train.py trainer.devices={num_processes} "
            "seed=$seed ...; done"
        )


def train_for_hydra(_: DictConfig) -> None:
    """Train one run of a sweep, from the overrides that Hydra chose for it."""
    hydra_config = HydraConfig.get()
    # A plus is only for Hydra; the records show what can be typed.
    overrides = [override.lstrip("+") for override in hydra_config.overrides.task]
    try:
        cfg = check(overrides)
        cfg.run_id = name_run(cfg)
    except ConfigError as error:
        sys.exit(failure.report(error))
    if hydra_config.mode is RunMode.MULTIRUN:
        cfg.run_id += f"-{hydra_config.job.num}"
    exit_code = train_or_report(cfg, overrides)
    if exit_code:
        sys.exit(exit_code)  # the runs after it would probably fail too


if __name__ == "__main__":
    process.run(main, interrupt_at_once=True)
