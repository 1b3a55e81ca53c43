"""Look for what would stop a run, and train nothing. It takes the same overrides as train.py.

python scripts/doctor.py trainer.devices=2
torchrun --standalone --nproc-per-node=2 scripts/doctor.py

Exit codes: 0 fit to run, 1 something failed, 2 wrong usage or configuration.
"""

import sys

import options  # noqa: F401 (puts src on the path)

from samestep.errors import ConfigError, RunError
from samestep.hydra.adapter import topology_of
from samestep.hydra.compose import check
from samestep.hydra.name import name_run
from samestep.node import agent
from samestep.ranks import environment, failure, process


def main(overrides: list[str]) -> int:
    """Examine all ranks; start them first, as train.py would. Returns the exit code."""
    if {"-h", "--help"} & set(overrides):
        print(__doc__)
        return 0
    try:
        cfg = check(overrides)
        cfg.run_id = name_run(cfg)
        if (num := agent.num_processes(*topology_of(cfg))) > 1:
            return agent.start([__file__, *overrides], num, run_id=cfg.run_id)
        environment.limit_threads()
        return examine(cfg)
    except (ConfigError, RunError) as error:
        return failure.report(error)


def examine(cfg) -> int:
    """Print on rank zero what all ranks find. Returns the exit code."""
    from samestep.hydra import build
    from samestep.hydra.adapter import spec_of
    from samestep.ranks import preflight, process_group
    from samestep.ranks.preflight import Finding
    from samestep.run.logs import mute_lightning

    mute_lightning()
    accelerator, timeout_s = cfg.trainer.accelerator, cfg.cluster.timeout_s
    way = preflight.find_rank_zero(accelerator, timeout_s)
    found = [Finding("rank zero", way)] if way else []
    with process_group.process_group(accelerator, timeout_s):
        cfg.run_id = process_group.broadcast(cfg.run_id)
        try:
            model, data, *_ = build.everything(cfg)
            found.append(Finding("data", "complete, intact and as configured"))
        except RunError as error:
            model, data = build.model(cfg), build.datamodule(cfg)
            found.append(Finding("data", "missing or damaged", str(error)))
        findings = preflight.inspect(spec_of(cfg), model, data, *found)
        for finding in findings:  # no rank may leave before rank zero has printed everything
            text = "; ".join(filter(None, finding[1:]))
            line = f"{finding.result:<8} {finding.check:<14} {text}"
            process_group.on_rank_zero(print, line, flush=True)
    error = preflight.failure(findings)
    return failure.exit_code(error) if error else 0


if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:]))
