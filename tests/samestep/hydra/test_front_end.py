import math
import re
from enum import Enum
from pathlib import Path

import pytest
import yaml
from omegaconf import open_dict

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError
from samestep.hydra.front_end import front_end_of
from samestep.run import lifecycle
from samestep.run.changes import find_changes
from samestep.run_spec import leaves


@pytest.mark.program
def test_secrets_stay_out_of_the_saved_configuration(
    spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_API_KEY", "sesame-open-123")
    overrides = ["data.mirror=http://me:hidden456@host/sesame-open-123"]
    lifecycle.open_directory(spec(*overrides), ["train.py", *overrides])
    for path in (tmp_path / "test").rglob("*.*"):
        assert b"sesame-open-123" not in path.read_bytes(), path
        assert b"hidden456" not in path.read_bytes(), path
    assert find_changes(spec(*overrides)) == {}
    saved = yaml.safe_load((tmp_path / "test/config.yaml").read_text())
    assert (saved["run_dir"], saved["data"]["num_classes"]) == (f"{tmp_path}/test", 10)


class Kind(Enum):
    SMALL = 1


@pytest.mark.program
def test_values_that_are_no_text_are_saved_and_continue(compose, tmp_path: Path):
    """Those of a project's own dataclasses, as Hydra's structured configs have them."""

    def make_spec(kind_of_data: Kind, fill: float):
        cfg = compose()
        with open_dict(cfg):
            cfg.data.mine = {"root": Path("a"), "kind": kind_of_data, "fill": fill, "names": b"x"}
        return front_end_of(cfg, [], {}, list)

    saved = make_spec(Kind.SMALL, math.nan)
    lifecycle.open_directory(saved, [])
    (tmp_path / "test/metrics.json").write_text("{}")
    config = yaml.safe_load((tmp_path / "test/config.yaml").read_text())
    assert config["data"]["mine"]["kind"] == "SMALL"
    assert find_changes(make_spec(Kind.SMALL, math.nan)) == {}
    with pytest.raises(ConfigError, match=r"data.mine.fill: nan -> 0.0"):
        find_changes(make_spec(Kind.SMALL, 0.0))


@pytest.mark.program
@pytest.mark.parametrize(
    ("changed", "is_finished"),
    [
        ([], True),
        (["callbacks.early_stopping.patience=2"], True),
        (["callbacks.early_stopping.patience=9"], False),
        (["~callbacks.early_stopping"], False),
    ],
)
def test_a_finished_run_goes_on_with_more_patience(spec, changed: list[str], is_finished: bool):
    early = "callbacks=early_stopping"
    lifecycle.open_directory(spec(early), [])
    lifecycle.finish(spec(early), {"test/loss": 0.5})
    assert lifecycle.is_finished(spec(early, *changed)) is is_finished


def test_the_table_of_keys_names_keys_that_exist(spec):
    scopes: dict[KeyScope, set[str]] = {}
    for key in leaves(spec("callbacks=early_stopping").config):
        scopes.setdefault(scope_of(key), set()).add(key)
    assert "callbacks.early_stopping.patience" in scopes[KeyScope.LIMIT]
    of_place = {"callbacks.checkpoints.every_s", "callbacks.loss_guard.max_skipped"}
    assert of_place < scopes[KeyScope.PER_NODE]
    assert "callbacks.checkpoints.dirpath" in scopes[KeyScope.COSMETIC]
    learned = " ".join(sorted(scopes[KeyScope.EXPERIMENT]))
    assert not re.search(r"run_id|run_root|run_dir|cluster\.|summary\.|choices", learned)
