from pathlib import Path

from library.tests.callbacks.tiny import STEPS_PER_EPOCH, Tiny, fit, killed_before_the_link
from samestep.run.checkpoint import find_valid, load


def kept(run_dir: Path) -> dict[str, int]:
    """The numbered checkpoints, which are verified by loading them, and their steps."""
    paths = sorted((run_dir / "checkpoints").glob("epoch-*.ckpt"))
    return {path.stem: load(path)["global_step"] for path in paths}


def test_every_second_epoch_is_kept_beside_last_and_best(tmp_path: Path):
    model, folder = Tiny([0.1, 0.2, 0.9, 0.3, 0.4]), tmp_path / "checkpoints"
    fit(tmp_path, model, max_epochs=4, every_n_epochs=2)
    assert kept(tmp_path) == {"epoch-0002": 2 * STEPS_PER_EPOCH, "epoch-0004": 4 * STEPS_PER_EPOCH}
    assert (folder / "last.ckpt").samefile(folder / "epoch-0004.ckpt"), "another name"
    assert load(folder / "best.ckpt")["global_step"] == 3 * STEPS_PER_EPOCH


def test_a_run_killed_before_the_link_links_when_it_continues(tmp_path: Path):
    with killed_before_the_link():
        fit(tmp_path, Tiny([0.1]), every_n_epochs=2)
    assert kept(tmp_path) == {}
    fit(tmp_path, Tiny([0.1]), ckpt="last.ckpt", every_n_epochs=2)
    assert kept(tmp_path) == {"epoch-0002": 2 * STEPS_PER_EPOCH}


def test_a_run_can_continue_from_one_that_was_kept(tmp_path: Path, monkeypatch):
    """It is read only if it is newer than the others that are whole."""
    fit(tmp_path, Tiny([0.9, 0.1, 0.1]), max_epochs=2, every_n_epochs=1)
    folder = tmp_path / "checkpoints"
    hashed = []
    verify = find_valid.__globals__["verify"]

    def noting(path: Path, identity: object) -> object:
        hashed.append(path.name)
        return verify(path, identity)

    monkeypatch.setitem(find_valid.__globals__, "verify", noting)
    assert find_valid(folder)[0] == folder / "last.ckpt"
    assert hashed == ["last.ckpt"]
    for name in ("last.ckpt", "last-previous.ckpt"):
        (folder / name).unlink()
    assert find_valid(folder)[0] == folder / "epoch-0002.ckpt"
    assert "epoch-0001.ckpt" not in hashed
