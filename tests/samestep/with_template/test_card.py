"""What the model card of an exported net says; that the Hub reads it: tests/project."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from project.card import write_card

CONFIG = {
    "run_id": "mine",
    "choices": {"data": "folder"},
    "data": {"num_channels": 3, "image_size": 64, "num_classes": 2},
    "model": {"net": {"_target_": "project.model.nets.cnn.CNN"}},
}


METRICS = {"test/accuracy": 0.75, "test/accuracy_0": 1.0, "test/loss": None,
           "val/accuracy": 0.7, "train/loss": 0.1}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STORE_TOKEN", "very-secret-value")
    OmegaConf.save(OmegaConf.create(CONFIG), tmp_path / "config.yaml")
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best.ckpt").touch()
    attempt = {
        "command": ["train.py", "data=folder", "data.root=/home/ada/birds", "seed=1",
                    "callbacks.artifacts.url=s3://me:very-secret-value@10.0.0.5/runs",
                    "+data.note=very-secret-value", "run_root=~/runs", "+x=['/srv/a',\"/srv/b\"]"],
        "git": {"commit": "3f2a1b", "dirty": True},
        "packages": "torch==2.15.0 numpy==2.4",
        "hostname": "ada-desk",
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"state": "finished", "starts": [attempt]}))
    return tmp_path


def test_the_page_says_where_the_net_comes_from(run_dir: Path):
    page = write_card(run_dir, "best", ["cat", "dog"], 93_950, None)
    assert "license" not in page
    for fact in ("2 classes: cat, dog", "| test/accuracy | 0.7500 |",
                 "`[B, 3, 64, 64]`", "3f2a1b, with uncommitted changes", "torch 2.15.0", "93950",
                 "python train.py data=folder data.root=... seed=1"):  # fmt: skip
        assert fact in page, fact
