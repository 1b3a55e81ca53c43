"""A run copied to a store again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from samestep import command_line
from samestep.run import upload
from tests.conftest import run
from tests.samestep.run.test_artifacts import contents, save

Upload = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Upload:
    """Runs the command, and returns its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        code = command_line.call(lambda: upload.main([str(word) for word in words]))
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was copied nowhere."""
    save(tmp_path / "mine", 1)
    (tmp_path / "mine/config.yaml").write_text("callbacks: {}\n")
    return tmp_path / "mine"


def test_what_is_missing_or_differs_is_copied(tmp_path: Path, run_dir: Path, call: Upload):
    store = tmp_path / "store/mine"
    node = f"{{url: '{tmp_path}/store', flush_timeout_s: 1}}"
    (run_dir / "config.yaml").write_text(f"callbacks: {{copies: {node}}}\n")
    assert call(run_dir) == (0, f"Uploaded: {store}\n", "")
    assert contents(store) == contents(run_dir)
    untouched = (store / "checkpoints/best.ckpt").stat().st_mtime_ns
    (store / "checkpoints/last.ckpt").write_bytes(b"rot")
    assert call(run_dir, "--url", f"file://{tmp_path}/store")[0] == 0
    assert contents(store) == contents(run_dir)
    assert (store / "checkpoints/best.ckpt").stat().st_mtime_ns == untouched


def test_a_run_without_a_store_needs_the_option(run_dir: Path, call: Upload):
    code, out, error = call(run_dir)
    assert (code, out) == (2, "")
    assert error == "error: the run has no store; name one, such as --url s3://bucket/runs\n"


def test_a_broken_store_is_named_with_each_file(tmp_path: Path, run_dir: Path, call: Upload):
    (tmp_path / "store").write_text("a file, not a folder")
    code, _, error = call(run_dir, "--url", tmp_path / "store")
    assert code == 1
    assert "error: checkpoints/last.ckpt: NotADirectoryError" in error
    assert all(line.startswith("error: ") for line in error.splitlines())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://x", "foo://x: ValueError: Protocol not known"),
        ("https://example.com/x", "cannot be written"),
        ("://", "://"),
        ("s3://", "s3://"),
    ],
)
def test_an_address_that_is_no_store_is_refused(
    run_dir: Path, call: Upload, monkeypatch: pytest.MonkeyPatch, url: str, message: str
):
    monkeypatch.chdir(run_dir)
    before = sorted(run_dir.rglob("*"))
    code, out, error = call(run_dir, "--url", url)
    assert (code, out) == (2, "")
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sorted(run_dir.rglob("*")) == before


def test_a_server_that_refuses_is_one_line_without_the_password(run_dir: Path, call: Upload):
    code, out, error = call(run_dir, "--url", "ftp://user:sesame99@127.0.0.1:1/runs")
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert "127.0.0.1:1/runs: ConnectionRefusedError" in error
    assert error.count("\n") == 1
    assert "sesame99" not in error


@pytest.mark.program
def test_an_unreachable_bucket_gives_no_traceback(run_dir: Path):
    pytest.importorskip("s3fs", reason="needs the extra s3")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_MAX_ATTEMPTS": "1"}
    words = ["-m", "samestep", "upload", str(run_dir), "--url", "s3://bucket/runs"]
    result = run(*words, AWS_ENDPOINT_URL="http://127.0.0.1:1", **keys)
    assert (result.returncode, result.stdout) == (1, "")
    assert "error: config.yaml: EndpointConnectionError" in result.stderr
    assert "Traceback" not in result.stderr
