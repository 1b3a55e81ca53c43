"""The list of runs as the live page gets it."""

from pathlib import Path
from typing import Any

from library.tests.report.fake import make_run
from samestep.report import listing, overview
from samestep.run import record


def described(folder: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The columns, and the runs by their names."""
    found = overview.describe_runs(folder, listing.list_runs(folder))
    return found["columns"], {run["name"]: run for run in found["runs"]}


def test_columns_are_what_differs(tmp_path: Path):
    typed = {"model.optimizer.lr": "the command line", "notes": "the command line"}
    make_run(tmp_path / "one", lr=0.5, overridden=typed)
    make_run(tmp_path / "two", seed=1)
    for name in ("one", "two"):
        with (tmp_path / name / "config.yaml").open("a") as file:
            file.write(f"notes: of {name}\n")
    columns, runs = described(tmp_path)
    # What was typed comes before what only differs, and a name is no difference.
    assert columns == ["model.optimizer.lr"]
    assert [runs[name]["values"] for name in ("one", "two")] == [
        {"model.optimizer.lr": "0.5"}, {"model.optimizer.lr": "0.25"},
    ]  # fmt: skip
    text = (tmp_path / "two/config.yaml").read_text()
    (tmp_path / "two/config.yaml").write_text(text.replace("lr: 0.25", "lr: 0.125"))
    assert described(tmp_path)[1]["two"]["values"] == {"model.optimizer.lr": "0.125"}
    (tmp_path / "two/config.yaml").write_text("{")
    assert described(tmp_path)[0] == []


def test_without_typed_keys_any_key_is_a_column(tmp_path: Path):
    make_run(tmp_path / "one", lr=0.5)
    make_run(tmp_path / "two", seed=1)
    assert described(tmp_path)[0] == ["model.optimizer.lr", "seed"]


def test_keys_of_single_runs_do_not_hide_those_of_many(tmp_path: Path):
    letters = "abcdefghij"
    for number, letter in enumerate(letters):
        typed = {letter: "the command line", "seed": "the command line"}
        run_dir = make_run(tmp_path / letter, seed=number, overridden=typed)
        with (run_dir / "config.yaml").open("a") as file:
            file.writelines(f"{other}: {int(other == letter)}\n" for other in letters)
    columns, _ = described(tmp_path)
    assert columns == ["seed", *letters[: overview.MAX_COLUMNS - 1]]


def test_seeds_of_one_configuration_have_their_mean(tmp_path: Path):
    for seed, best in enumerate((0.5, 0.75, 0.625)):
        record.update(
            make_run(tmp_path / f"a{seed}", seed=seed), record.FINISHED, best=best
        )  # fmt: skip
    record.update(make_run(tmp_path / "a3", seed=3), record.STOPPED, "SIGTERM")
    for name in ("again", "third"):
        # Their mean would have an interval of zero.
        record.update(make_run(tmp_path / name, seed=0, lr=0.125), record.FINISHED, best=0.5)
    make_run(tmp_path / "b", lr=0.5)
    _, runs = described(tmp_path)
    assert sorted(runs["a1"]["repeats"]) == ["a0", "a1", "a2"]
    assert runs["a1"]["mean"] == "0.6250 ± 0.31 (n = 3)"
    assert (runs["a3"]["mean"], runs["b"]["mean"], runs["b"]["repeats"]) == ("", "", [])
    assert (runs["again"]["mean"], runs["third"]["repeats"]) == ("", [])


def test_a_pruned_trial_says_so(tmp_path: Path):
    record.update(make_run(tmp_path / "one"), record.STOPPED, "pruned after validation 2")
    _, runs = described(tmp_path)
    assert runs["one"]["state"] == "pruned after validation 2"
