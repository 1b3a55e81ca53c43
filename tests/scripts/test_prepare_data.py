"""The doorway; what it downloads is tested in tests/project/data and tests/samestep/data."""

import prepare_data
from omegaconf import OmegaConf

from samestep.command_line import call


def test_data_without_a_source_are_refused_with_one_line(monkeypatch, capsys):
    """A DataModule of the user's own, as docs/contract.md has it, need not have one."""
    cfg = OmegaConf.create({"choices": {"data": "mine"}, "data": {"_target_": "x.Mine"}})
    monkeypatch.setattr(prepare_data, "compose_run", lambda overrides: cfg)
    assert call(lambda: prepare_data.main(["data=mine"])) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: data=mine: has no data.source")
    assert error.count("\n") == 1
