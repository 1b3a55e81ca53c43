"""What was compiled is beside the checkpoint, for each process of a node."""

from pathlib import Path

import pytest
import torch

from library.tests.programs import run_code
from samestep.plugins import compiled_code
from samestep.plugins.compiled_code import CompiledCode
from samestep.ranks import environment

PROGRAM = """
import sys

from torch import nn
from torch._dynamo.utils import counters

from library.tests.small import Data, Net
from samestep import Trainer


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 1)  # needs no C++, which takes half a minute
        self.net.compile(dynamic=False)


run_dir, max_epochs = sys.argv[1:]
trainer = Trainer(
    run_dir=run_dir, accelerator="cpu", max_epochs=int(max_epochs), logger=False,
    enable_progress_bar=False, enable_model_summary=False, strategy="auto",
)
trainer.fit(Compiled(), datamodule=Data())
print("found:", counters["inductor"]["fxgraph_cache_hit"] > 0)
"""

needs_artifacts = pytest.mark.skipif(
    not hasattr(torch.compiler, "save_cache_artifacts"), reason="torch 2.6 cannot hand them out"
)


def train(folder, max_epochs):
    """Train up to an epoch in two ranks, on a machine where nothing has been compiled."""
    words = (str(folder / "run"), str(max_epochs))
    new = {"TORCHINDUCTOR_CACHE_DIR": str(folder / words[-1]), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = run_code(PROGRAM, *words, nodes=(2,), **new)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.program
@needs_artifacts
def test_a_new_node_finds_what_each_rank_has_compiled(tmp_path):
    train(tmp_path, 1)
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("*.bin"))
    assert kept == ["compiled-0.bin", "compiled-1.bin"]
    assert train(tmp_path, 2).count("found: True") == 2


def kept_in(folder: Path) -> CompiledCode:
    code = CompiledCode()
    code._folder = folder
    return code


def test_code_is_written_once_and_a_full_disk_is_told(tmp_path, monkeypatch, caplog):
    content = b"one"
    monkeypatch.setattr(compiled_code, "read_compiled", lambda: content)
    own = kept_in(tmp_path)
    path = tmp_path / "compiled-0.bin"
    own.keep()
    assert path.read_bytes() == content
    path.unlink()
    own.keep()
    assert not path.exists()
    content = b"one and two"
    own.keep()
    assert path.read_bytes() == content
    kept_in(tmp_path / "missing").keep()
    assert "a restart compiles again" in caplog.text


def test_a_damaged_file_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert environment.local_rank() == 0
    (tmp_path / "compiled-0.bin").write_bytes(b"damaged")
    kept_in(tmp_path).restore()
