"""Run the checks that every rank makes before it trains, and stop. Overrides are those of train.py.

samestep doctor trainer.devices=2
torchrun --standalone --nproc-per-node=2 -m samestep doctor

Exit codes: 0 ready to train, 1 a check failed, 2 invalid arguments or configuration.
"""

from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.hydra.front_end import topology_of
from samestep.hydra.program import compose_run
from samestep.node import agent
from samestep.plugins import starting
from samestep.ranks import environment, failure


def main(overrides: Sequence[str]) -> int:
    """Examine all ranks; start them first, as train.py would. Returns the exit code."""
    cfg = compose_run(overrides)
    num = starting.num_processes(*topology_of(cfg))
    if num > 1:
        return agent.start(["-m", "samestep", "doctor", *overrides], num, run_id=cfg.run_id)
    environment.limit_threads()
    return examine(cfg)


def examine(cfg: DictConfig) -> int:
    """Print on rank zero what all ranks find. Returns the exit code."""
    from samestep import fit_checks
    from samestep.hydra.build import build_run
    from samestep.plugins import preflight
    from samestep.plugins.preflight import Finding
    from samestep.ranks import meeting, process_group
    from samestep.trainer import distributed_session

    accelerator, timeout_s = cfg.trainer.accelerator, cfg.cluster.timeout_s
    preflight.before_meeting(accelerator)
    way = meeting.find_rank_zero(timeout_s)
    found = [Finding("rank zero", way)] if way else []
    trainer, model, data = build_run(cfg)
    with distributed_session(accelerator, timeout_s):
        try:
            fit_checks.set_up_data(trainer, data)
            found.append(Finding("data", "complete, intact and as configured"))
        except RunError as error:
            found.append(Finding("data", "missing or damaged", str(error)))
        findings = preflight.inspect(trainer.spec, model, data, *found)
        for finding in findings:  # no rank may leave before rank zero has printed everything
            text = "; ".join(filter(None, finding[1:]))
            line = f"{finding.result:<8} {finding.check:<14} {text}"
            process_group.on_rank_zero(print, line, flush=True)
    failed = preflight.failure(findings)
    return failure.exit_code(failed) if failed else 0
