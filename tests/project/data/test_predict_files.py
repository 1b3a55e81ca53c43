"""Image files found and predicted without the command line."""

import shutil
from pathlib import Path

import pytest
import yaml
from lightning import Trainer
from omegaconf import OmegaConf
from PIL import Image

from project.data.sources import find_images
from samestep import ConfigError, load_run
from samestep.hydra import build
from samestep.hydra.compose import check
from samestep.run.checkpoint import AtomicCheckpointIO


def test_a_directory_stands_for_all_images_in_and_below_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.png", "a.JPG", "deep/c.webp", "notes.txt"):
        (tmp_path / name).touch()
    names = ["a.JPG", "b.png", "deep/c.webp"]
    assert find_images([str(tmp_path)]) == [tmp_path / name for name in names]


def test_a_directory_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no images; they end in \.jpg"):
        find_images([str(tmp_path)])


def test_classes_named_by_folders_are_known_without_the_folders(tmp_path: Path) -> None:
    folders, run_dir = tmp_path / "pets", tmp_path / "runs" / "pets"
    for number, name in enumerate(["cat", "dog", "cat", "dog"]):
        path = folders / ("train", "test")[number // 2] / name / "1.png"
        path.parent.mkdir(parents=True)
        Image.new("L", (8, 8), 200 * (number % 2)).save(path)
        shutil.copy(path, path.with_stem("2"))
    cfg = check(
        [
            *("data=folder", f"data.root={folders}", "data.num_classes=2", "data.num_val=1"),
            *("data.image_size=8", "data.global_batch_size=3", "data.num_workers=0"),
            *("model=mlp", f"run_root={run_dir.parent}", "run_id=pets"),
        ]
    )
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(OmegaConf.to_container(cfg, resolve=True)))
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    trainer.fit(build.build_model(cfg), build.build_datamodule(cfg))
    trainer.save_checkpoint(run_dir / "checkpoints" / "best.ckpt")
    unknown = (folders / "test" / "dog" / "1.png").rename(tmp_path / "unknown.png")
    shutil.rmtree(folders)

    model, data = load_run(run_dir)
    data.predict_files = [str(unknown)]
    (batch,) = data.predict_dataloader()
    assert (batch.files, data.class_names) == ([str(unknown)], ["cat", "dog"])
    assert model.predict_step(batch, 0)["probability"].shape == (1, 2)

    for name in ("ant", "bee"):
        (folders / "train" / name).mkdir(parents=True)
        shutil.copy(unknown, folders / "train" / name)
    with pytest.raises(ConfigError, match="the model knows the classes"):
        data.setup("test")
