import json
from pathlib import Path

from project.records import read_history
from project.summary import summary


def test_the_summary_says_what_the_files_say(digits_run: Path):
    text = summary(digits_run, seconds=61.4)
    final = json.loads((digits_run / "metrics.json").read_text())
    best = max(row.get("val/accuracy", 0) for row in read_history(digits_run))
    for fact in (
        f"test/accuracy  {final['test/accuracy']:.4f}",
        f"test/loss      {final['test/loss']:.4f}",
        f"val/accuracy   {best:.4f} in epoch ",
        "epochs         2\n",
        "time           0:01:01",
        "images/s       ",
    ):
        assert fact in text, fact


def test_the_summary_says_what_to_type_next(digits_run: Path):
    text = summary(digits_run)
    assert f"python scripts/evaluate.py run={digits_run}\n" in text
    assert f"python scripts/predict.py run={digits_run} image.png\n" in text
    assert text.endswith(
        "RUN_ID=digits python train.py trainer.accelerator=cpu data.global_batch_size=60 "
        f"run_root={digits_run.parent} trainer.max_epochs=4"
    )
    assert "time" not in text
