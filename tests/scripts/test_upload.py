"""The doorway that copies a run to a store again."""

import sys
from pathlib import Path

import pytest
import upload

from tests.samestep.run.test_artifacts import contents, save


@pytest.fixture
def said(capsys, monkeypatch):
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["upload.py", *words])
        code = upload.main()
        return code, *capsys.readouterr()

    return call


def test_what_is_missing_or_differs_is_copied(tmp_path: Path, said):
    run_dir, store = tmp_path / "mine", tmp_path / "store/mine"
    save(run_dir, 1)
    (run_dir / "config.yaml").write_text(f"callbacks: {{artifacts: {{url: '{tmp_path}/store'}}}}\n")
    assert said(f"run={run_dir}") == (0, f"Uploaded: {store}\n", "")
    assert contents(store) == contents(run_dir)
    untouched = (store / "metrics.csv").stat().st_mtime_ns
    (store / "checkpoints/last.ckpt").write_bytes(b"rot")
    (store / "checkpoints/last.ckpt.sha256").unlink()
    assert said(f"run={run_dir}", f"url=file://{tmp_path}/store")[0] == 0
    assert contents(store) == contents(run_dir)
    assert (store / "metrics.csv").stat().st_mtime_ns == untouched


def test_wrong_usage_and_a_broken_store_say_so(tmp_path: Path, said):
    save(tmp_path / "mine", 1)
    (tmp_path / "mine/config.yaml").write_text("callbacks: {}\n")
    assert said("run=nowhere")[0] == 2
    code, _, error = said(f"run={tmp_path}/mine")
    assert (code, error[:12]) == (2, "error: url=:")
    (tmp_path / "store").write_text("a file, not a folder")
    code, _, error = said(f"run={tmp_path}/mine", f"url={tmp_path}/store")
    assert code == 1
    assert "checkpoints/last.ckpt: NotADirectoryError" in error
    assert said("--help")[0] == 0
