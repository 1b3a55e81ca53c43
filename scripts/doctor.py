"""Look for what would stop a run, and train nothing. Takes the words of train.py.

python scripts/doctor.py data=cifar10 trainer.devices=2
torchrun --standalone --nproc-per-node=2 scripts/doctor.py cluster=k8s

Exit codes: 0 fit to run, 1 something failed, 2 wrong usage or configuration.
"""

import sys
from pathlib import Path

from project.train import fail
from samestep.config.compose import check
from samestep.errors import ConfigError
from samestep.launch import agent
from samestep.ranks import environment
from samestep.run.name import name_run


def main(words: list[str]) -> int:
    """Examine this process and those torchrun started with it; start them if there should be more.

    Returns:
        0, 1 or 2, as above.
    """
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        cfg = check(words)
        cfg.run_id = name_run(cfg)
        if (num := agent.num_processes(cfg)) > 1:
            return agent.start(words, num, run_id=cfg.run_id, script=Path(__file__).resolve())
        environment.limit_threads()
        return examine(cfg)
    except ConfigError as error:
        return fail(error, exit_code=2)


def examine(cfg) -> int:
    """Print on rank zero what all ranks find."""
    from samestep import build
    from samestep.data.download import DataError
    from samestep.ranks import preflight
    from samestep.ranks import process_group as distributed

    build.check(cfg)
    model, data, extra = build.model(cfg), build.datamodule(cfg), []
    data.check_batch_size(environment.world_size(), cfg.trainer.accumulate_grad_batches)
    try:
        if way := preflight.before(cfg):
            extra.append(preflight.Finding("rank zero", way))
        if environment.local_rank() == 0:
            try:
                data.prepare_data()
                extra.append(preflight.Finding("data", f"complete and intact in {data.root}"))
            except DataError as error:
                extra.append(preflight.Finding("data", "missing or damaged", str(error)))
        with distributed.process_group(cfg):
            cfg.run_id = distributed.from_rank_zero(str, cfg.run_id)
            findings = preflight.inspect(cfg, model, *extra)
            for finding in findings:  # the other ranks stay until rank zero has told all
                told = "; ".join(filter(None, finding[1:]))
                line = f"{finding.result:<8} {finding.check:<14} {told}"
                distributed.from_rank_zero(print, line, flush=True)
    except RuntimeError as error:  # a PreflightError, or ranks that do not meet
        return fail(error, exit_code=1)
    error = preflight.failure(findings)
    return 0 if error is None else 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
