"""The model card of an exported net, read by the library of the Hugging Face Hub."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from samestep.model_card import read_metrics, write_card
from samestep.run import record


def parse(text: str) -> Any:
    """The card, as the library of the Hub reads it."""
    from huggingface_hub import ModelCard  # takes a second, in each process of pytest-xdist

    return ModelCard(text)


CONFIG = {
    "run_id": "mine",
    "choices": {"data": "folder"},
    "data": {"num_channels": 3, "image_size": 64, "num_classes": 2},
    "model": {"net": {"_target_": "project.nets.cnn.CNN"}},
}


INPUTS = ["uint8 [B, 3, 64, 64]"]
METRICS = {"test/accuracy": 0.75, "test/accuracy_0": 1.0, "test/loss": None,
           "val/accuracy": 0.7, "train/loss": 0.1}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STORE_TOKEN", "very-secret-value")
    OmegaConf.save(OmegaConf.create(CONFIG), tmp_path / "config.yaml")
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best.ckpt").touch()
    (tmp_path / "logs").mkdir()
    attempt = {
        "command": ["train.py", "data=folder", "data.root=/home/ada/birds", "seed=1",
                    "callbacks.artifacts.url=s3://me:very-secret-value@10.0.0.5/runs",
                    "+data.note=very-secret-value", "run_root=~/runs", "+x=['/srv/a',\"/srv/b\"]"],
        "git": {"commit": "3f2a1b", "dirty": True},
        "packages": "torch==2.15.0 numpy==2.4",
        "hostname": "ada-desk",
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps({"starts": [attempt]}))
    return tmp_path


def test_the_hub_reads_the_metadata(run_dir: Path):
    card = parse(
        write_card(
            run_dir, "best", ["cat", "dog"], num_weights=93_950, licence="Apache-2.0", inputs=INPUTS
        )
    )
    assert card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.library_name == "pytorch"
    assert card.data.model_name == "mine"
    (result,) = card.data.eval_results  # nan, and what is of one class, is left out
    assert result.metric_type == "accuracy"
    assert result.metric_name == "test/accuracy"
    assert result.metric_value == 0.75
    assert result.dataset_name == "folder"
    assert result.task_type == "image-classification"


@pytest.mark.parametrize("name", ["test/loss", "test_loss", "loss/test", "loss_test"])
def test_the_type_of_a_metric_is_its_name_without_the_stage(run_dir: Path, name: str):
    (run_dir / "metrics.json").write_text(json.dumps({name: 0.5}))
    page = write_card(run_dir, "best", [], num_weights=1, licence=None, inputs=INPUTS)
    front = yaml.safe_load(page.split("---\n")[1])
    (metric,) = front["model-index"][0]["results"][0]["metrics"]
    assert metric == {"type": "loss", "name": name, "value": 0.5}


def test_the_page_has_no_secrets_and_no_places(run_dir: Path):
    page = write_card(run_dir, "best", ["cat", "dog"], num_weights=1, licence="MIT", inputs=INPUTS)
    for private in ("very-secret", "/home", "10.0.0.5", "s3:", "~", "/srv", "ada-desk",
                    str(run_dir)):  # fmt: skip
        assert private not in page, private


@pytest.mark.parametrize(
    ("ckpt", "status", "shown"),
    [
        ("best", record.FINISHED, {"test/accuracy": 0.75}),
        ("best", record.STOPPED, {}),  # continued since the test, and not tested
        ("last", record.FINISHED, {}),
    ],
)
def test_the_metrics_are_those_of_the_exported_weights(run_dir: Path, ckpt, status, shown):
    record.update(run_dir, status)
    assert read_metrics(run_dir, ckpt) == shown
    page = write_card(
        run_dir,
        ckpt,
        ["cat", "dog"],
        num_weights=1,
        licence="LicenseRef-Proprietary",
        inputs=INPUTS,
    )
    assert (f"The checkpoint `{ckpt}` was not tested." in page) == (not shown)
    card = parse(page)
    assert (card.data.eval_results is None) == (not shown)
    assert (card.data.license, card.data.license_name) == ("other", "licenseref-proprietary")


def test_a_run_without_records_has_a_card(run_dir: Path):
    (run_dir / "run.json").unlink()
    (run_dir / "metrics.json").unlink()
    page = write_card(run_dir, "best", ["cat", "dog"], num_weights=1, licence="MIT", inputs=INPUTS)
    assert "**Commit**: unknown" in page
    assert parse(page).data.eval_results is None


def test_the_page_says_where_the_net_comes_from(run_dir: Path):
    page = write_card(
        run_dir, "best", ["cat", "dog"], num_weights=93_950, licence=None, inputs=INPUTS
    )
    assert "license" not in page
    for fact in ("2 classes: cat, dog", "| test/accuracy | 0.7500 |",
                 "uint8 [B, 3, 64, 64]",
                 "3f2a1b, with uncommitted changes", "torch 2.15.0", "93950",
                 "python train.py data=folder data.root=... seed=1"):  # fmt: skip
        assert fact in page, fact
