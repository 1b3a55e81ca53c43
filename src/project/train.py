"""Train and test one model.

python train.py                                     # the default run, on this machine
python train.py trainer.max_epochs=5 seed=1         # other values
python train.py trainer.devices=2                   # two processes, with or without GPUs
torchrun --standalone --nproc-per-node=2 train.py
python train.py --help

Torch is imported where training begins: help and errors answer before.
"""

from collections.abc import Sequence

from omegaconf import DictConfig

KEEPS_NOTHING = "trainer.fast_dev_run keeps no results; the name is free"
NOTHING_TO_DO = "Nothing to do, the run is finished. RUN_ID=<another name> starts a new one."


def train(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Fit the model that ``cfg`` describes, test its best checkpoint, and write the results.

    A run whose directory holds a checkpoint continues from it; a finished one is left alone.

    Args:
        cfg: the composed ``configs/train.yaml``; its ``run_id`` is set.
        overrides: what made it from the defaults, for the records.

    Returns:
        The final figures, as in ``metrics.json``: ``{"test/accuracy": 0.98, ...}``, also of a run
        that was finished before; nothing on ranks other than zero.

    Raises:
        ConfigError: if the configuration cannot be run; nothing was changed then.
        RunError: if the data are missing or damaged, or the run cannot go on.
    """
    import lightning as L

    from samestep import ending
    from samestep.hydra import build
    from samestep.hydra.adapter import spec_of
    from samestep.ranks import preflight, process_group, stopping
    from samestep.report import page, summary
    from samestep.run import artifacts, metrics, nodes
    from samestep.run import directory as run
    from samestep.run.logs import log_to_files, mute_lightning

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
            if not trainer.is_global_zero:
                return {}
            print(NOTHING_TO_DO, summary.summarize(spec.run_dir), sep="\n", flush=True)
            return metrics.read_final_metrics(spec.run_dir) or {}
        again = summary.resume_command(spec.config, spec.run_dir, None)
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
                ckpt_path = nodes.best_checkpoint(spec)
                if ckpt_path is None and trainer.is_global_zero and not spec.saves_nothing:
                    print("Note: no epoch was the best one, so the last weights are tested")
                ckpt_path = ckpt_path or nodes.last_checkpoint(spec)
                trainer.test(model, datamodule, ckpt_path=ckpt_path, verbose=False)
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
            print(summary.summarize(spec.run_dir), flush=True)
            return figures
