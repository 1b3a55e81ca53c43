"""The page about ``samestep.Trainer``."""

import re
from pathlib import Path

from tests.conftest import ROOT, run
from tests.samestep.test_trainer import SCRIPT


def test_the_page_does_what_it_says(tmp_path: Path):
    page = (ROOT / "docs/trainer.md").read_text()
    assert len(page.splitlines()) <= 70
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    block = block.replace("max_epochs=20", "max_epochs=1, accelerator='cpu'")
    (tmp_path / "script.py").write_text(SCRIPT + block)
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "runs/mine").iterdir()}
    assert names >= {"config.yaml", "metrics.csv", "metrics.json", "checkpoints", "logs"}
