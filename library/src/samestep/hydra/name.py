"""The name of a run: it is also the name of its directory."""

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.hydra.rules import NAME
from samestep.ranks import environment


def name_run(cfg: DictConfig) -> str:
    """The name the run was given, or a new one such as ``mnist-mlp-3f2a1b``.

    The first of these counts: ``run_id`` of the configuration, ``$RUN_ID``, torchrun's run id, and
    a new name from the chosen data, the chosen model and six random hexadecimal characters.

    Raises:
        ConfigError: if ``$RUN_ID`` or torchrun's run id cannot be the name of a directory.
    """
    chosen = [str(name) for name in (cfg.choices.data, cfg.choices.model) if name]
    name = cfg.run_id or environment.run_id() or environment.new_run_id(*chosen)
    if not NAME.holds(name):
        raise ConfigError(
            f"RUN_ID={name}: must be at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return str(name)
