"""What the tests share cannot hide a fault."""

import shutil
from pathlib import Path

from samestep.hydra.compose import check
from tests.conftest import CONFIGS, compose_in


def test_a_composition_is_remembered_only_while_nothing_changes(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_PROJECT", str(tmp_path))
    configs = shutil.copytree(CONFIGS, tmp_path / "configs")

    def seed(*overrides: str) -> int:
        cfg = check(list(overrides))
        found: int = cfg.seed
        cfg.seed = 99  # a test may change what it was given
        return found

    assert seed() == 0
    composed = compose_in.cache_info().misses
    assert seed() == 0
    assert compose_in.cache_info().misses == composed
    assert seed("seed=7") == 7
    train = configs / "train.yaml"
    train.write_text(train.read_text().replace("seed: 0", "seed: 1"))
    assert seed() == 1
