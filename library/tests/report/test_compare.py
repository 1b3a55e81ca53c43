"""Several runs side by side."""

import json
from pathlib import Path

import pytest
from scipy import stats

from library.tests.report.fake import make_run
from samestep.errors import ConfigError
from samestep.report import charts, compare
from samestep.report.files import read_run
from samestep.run import record


def rows_of(*run_dirs: Path) -> dict[str, list[compare.Cell]]:
    """Every row of the tables; the heading of the metrics is ``""``."""
    tables = compare.compare([read_run(path) for path in run_dirs])
    return {str(name): row for rows in tables.values() for name, *row in rows}


def marks(*run_dirs: Path, metric: str = "test/score") -> list[tuple[str, str]]:
    return [(str(cell), cell.mark) for cell in rows_of(*run_dirs)[metric]]


def make_runs(folder: Path, **scores: list[float]) -> list[Path]:
    """Runs of several configurations, with the seeds 0, 1, 2 ..."""
    return [
        make_run(folder / f"{name}{n}", seed=n, score=score, lr=ord(name))
        for name, each in scores.items() for n, score in enumerate(each)
    ]  # fmt: skip


def test_what_differs_in_the_configuration(tmp_path: Path):
    runs = make_run(tmp_path / "one"), make_run(tmp_path / "other", lr=0.5)
    rows = compare.compare(list(map(read_run, runs)))["Configuration: what differs"]
    assert rows[1:] == [["model.optimizer.lr", "0.25", "0.5"]]  # and not run_id


def test_runs_that_differ_in_the_seed_are_compared_seed_by_seed(tmp_path: Path):
    one, other = [0.5, 0.75, 0.625], [0.75, 1.01, 0.895]
    rows = rows_of(*make_runs(tmp_path, a=one, b=other))
    # Not a0: the names of runs have their seeds, as in a grid.
    assert rows[""] == ["lr=97 (n = 3)", "lr=98 (n = 3)", "lr=98 (n = 3) - lr=97 (n = 3)"]
    assert rows["seeds"] == ["0, 1, 2", "0, 1, 2"]
    assert rows["model.optimizer.lr"] == ["97", "98"]
    value, _, gap = (cell.estimate for cell in rows["test/score"])
    low, high = stats.t.interval(0.95, 2, 0.625, stats.sem(one))
    assert (value.mean, value.n) == (0.625, 3)
    assert value.interval95 == pytest.approx((high - low) / 2)
    # The noise of the seeds drops out.
    low, high = stats.t.interval(0.95, 2, 0.26, stats.sem([0.25, 0.26, 0.27]))
    assert gap.paired
    assert (gap.mean, gap.interval95) == pytest.approx((0.26, (high - low) / 2))


def test_a_group_has_a_short_name_of_its_own(tmp_path: Path):
    runs = make_runs(tmp_path, a=[0.5, 0.75], b=[0.5], c=[0.5, 0.75, 1.0])
    assert rows_of(*runs)[""][:3] == ["lr=97 (n = 2)", "b0", "lr=99 (n = 3)"]
    for run in runs[3:]:
        with (run / "config.yaml").open("a") as file:
            file.write("data: {a: 1, b: 2, c: 3}\n")
    # A heading has three settings at most; those of a0 and b0 are the same without lr.
    assert rows_of(*runs)[""][:3] == ["a0 (n = 2)", "b0", "a=1, b=2, c=3 (n = 3)"]
    others = [make_run(tmp_path / f"x{n}", seed=n, lr=97, world_size=2) for n in (0, 1)]
    assert rows_of(*runs[:3], *others)[""][:3] == ["a0 (n = 2)", "b0", "x0 (n = 2)"], "of ranks"


def test_other_seeds_are_compared_by_their_means(tmp_path: Path):
    one, other = [0.5, 0.7, 0.6], [0.9, 0.8]
    runs = make_runs(tmp_path, a=one, b=other)
    gap = rows_of(*runs)["test/score"][2].estimate
    assert not gap.paired
    low, high = stats.ttest_ind(other, one, equal_var=False).confidence_interval(0.95)
    assert (gap.mean, gap.interval95) == pytest.approx(((low + high) / 2, (high - low) / 2))
    assert rows_of(runs[0], runs[3])["test/score"] == ["0.5000", "0.9000", "+0.4000"]


def test_runs_of_one_configuration_and_seed_are_shown_side_by_side(tmp_path: Path):
    """Such as runs of changed code: none may take the place of the other."""
    runs = [make_run(tmp_path / name, score=score) for name, score in (("one", 0.5), ("two", 0.75))]
    assert rows_of(*runs)["test/score"] == ["0.5000", "0.7500", "+0.2500"]
    assert rows_of(*runs)["nothing"] == ["", ""]  # the configuration
    more = [make_run(tmp_path / f"{name}1", seed=1, score=0.5 + n) for n, name in enumerate("ab")]
    rows = rows_of(runs[0], *more, runs[1])
    assert rows[""][:2] == ["one (n = 2)", "b1 (n = 2)"], "nothing differs"
    assert rows["runs"] == ["one, a1", "b1, two"]
    gap = rows["test/score"][2].estimate
    assert (gap.mean, gap.n, gap.paired) == (pytest.approx(0.625), 2, True)


def test_seeds_of_parts_are_seeds_too(tmp_path: Path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for number, run in enumerate(runs):
        with (run / "config.yaml").open("a") as file:
            file.write(f"data: {{seed: {number}}}\n")
    assert rows_of(*runs)[""] == ["one (n = 2)"]
    assert rows_of(*runs)["test/score"][0].estimate.n == 2


def test_an_unfinished_run_is_no_repeat_of_finished_ones(tmp_path: Path):
    runs = make_runs(tmp_path, a=[0.5, 0.5, 0.5])
    record.update(runs[1], record.STOPPED, "SIGTERM", tags=["a", "b"], notes="to try")
    rows = rows_of(*runs)
    assert rows[""][:2] == ["a0 (n = 2)", "a1 (stopped, newest metrics)"]
    assert rows["state"] == ["finished", "stopped"]
    assert rows["test/score"][:2] == ["0.5000 (0.5000 and 0.5000)", ""]
    assert rows["val/score"][:2] == ["", "0.7000"]
    assert (rows["tags"], rows["notes"]) == (["", "a, b"], ["", "to try"])


def test_the_best_value_is_marked_and_a_difference_beyond_chance_is_better_or_worse(tmp_path: Path):
    runs = make_runs(tmp_path, a=[0.5, 0.75, 0.625], b=[0.6, 0.7, 0.6], c=[0.75, 1.0, 0.875])
    assert marks(*runs) == [
        ("0.6250 ± 0.31", ""), ("0.6333 ± 0.14", ""), ("0.8750 ± 0.31", "highest"),
        ("+0.008333 ± 0.2 paired", ""), ("+0.2500 ± 0 paired", "better"),
    ]  # fmt: skip
    one, other = runs[6], runs[0]
    assert marks(one, other)[-1] == ("-0.2500", ""), "of one seed: no interval is known"
    for run_dir in runs:
        record.update(run_dir, record.FINISHED, mode="min")
    assert marks(one, other) == [("0.7500", ""), ("0.5000", "lowest"), ("-0.2500", "")]
    for run_dir in runs:
        record.update(run_dir, record.FINISHED, monitor="val/other")
    assert {mark for _, mark in marks(one, other)} == {""}


def test_a_difference_within_rounding_is_none(tmp_path: Path):
    runs = make_runs(tmp_path, a=[0.5, 0.25], b=[0.5000001, 0.2500001], c=[0.501, 0.251])
    means = marks(*runs)
    assert [mark for _, mark in means] == ["", "", "highest", "", "better"]
    assert marks(*runs[:4])[:2] == [("0.3750 (0.5000 and 0.2500)", "")] * 2, "none is best"


def test_less_loss_or_time_and_more_speed_are_better_whatever_is_monitored(tmp_path: Path):
    runs = make_runs(tmp_path, a=[0.5, 0.5], b=[0.5, 0.5])
    for run in runs[:2]:
        (run / "metrics.json").write_text('{"test/loss": 0.5, "time/epoch_s": 2}')
    for run in runs[2:]:
        (run / "metrics.json").write_text('{"test/loss": 0.25, "time/epoch_s": 4}')
        table = (run / "metrics.csv").read_text().replace(",100.0,", ",2000,")
        (run / "metrics.csv").write_text(table)

    def words(metric: str) -> list[str]:
        return [mark for _, mark in marks(*runs, metric=metric)]

    assert words("test/loss") == ["", "lowest", "better"]
    assert words("time/epoch_s") == ["lowest", "", "worse"]
    assert words("points/s") == ["", "highest", "better"]


@pytest.mark.parametrize(
    "other", [{"hostname": "slow"}, {"load": 3.0}, {"load": None}, {"gpus": ["H100"]}]
)
def test_speeds_of_different_machines_or_loads_are_not_judged(tmp_path: Path, other: dict):
    runs = make_runs(tmp_path, a=[0.5, 0.5], b=[0.75, 0.75])
    for run in runs[2:]:
        (run / "metrics.json").write_text('{"test/score": 0.75, "time/epoch_s": 4}')
    # One of several starts is enough.
    starts = [*record.read(runs[3]).starts]
    record.update(runs[3], record.FINISHED, starts=[{**starts[0], **other}, *starts])
    assert [mark for _, mark in marks(*runs, metric="time/epoch_s")] == ["", "", ""]
    assert [mark for _, mark in marks(*runs)] == ["", "highest", "better"]


def test_the_same_run_on_more_ranks_is_no_repeat(tmp_path: Path):
    one = make_run(tmp_path / "one")
    rows = rows_of(one, make_run(tmp_path / "two", world_size=2))
    assert (rows["ranks"], rows["epochs"], rows["steps"]) == (["1", "2"], ["3", "3"], ["30", "30"])


def test_damaged_runs_are_compared_as_far_as_known(tmp_path: Path, capsys):
    one, other, third = (make_run(tmp_path / name) for name in ("one", "other", "third"))
    (one / "metrics.json").unlink()
    for name in ("metrics.json", "metrics.csv", "run.json"):
        (other / name).write_text("damaged")
    text = (third / "config.yaml").read_text().replace("seed: 0", "seed: [1]")
    (third / "config.yaml").write_text(text)
    tables = compare.compare([read_run(run_dir) for run_dir in (one, other, third)])
    assert tables["Runs"][0][1:] == [
        "one (finished, newest metrics)", "other (finished, newest metrics)", "third",
    ]  # fmt: skip
    assert compare.main([*map(str, (one, other, third))]) == 0
    assert "other: metrics.json is absent or damaged" in capsys.readouterr().err


def test_metrics_of_plain_lightning_are_compared_and_share_a_chart(tmp_path: Path):
    run = make_run(tmp_path / "one")
    table = (run / "metrics.csv").read_text().replace("/loss", "_loss")
    (run / "metrics.csv").write_text(table)
    (run / "metrics.json").write_text('{"test_loss": 0.5, "time/total_s": 6}')
    assert rows_of(run, run)["test_loss"] == ["0.5000", "0.5000", "0.000"]
    (loss, *_) = charts.charts_of([read_run(run)])
    assert [curve["name"] for curve in loss.curves] == ["train_loss", "val_loss"]


def test_the_terminal_and_json_have_the_same_metrics(tmp_path: Path, capsys):
    run_dirs = make_run(tmp_path / "one"), make_run(tmp_path / "[b]o<b>", lr=1, score=1)
    words = [str(run_dir) for run_dir in run_dirs]
    assert compare.main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["Configuration: what differs"]["columns"] == ["one", "[b]o<b>"]
    _, value, gap = plain["Final metrics"]["test/score"]
    assert value == {"mean": 1.0, "interval95": None, "n": 1, "paired": False}
    assert gap == {"mean": 0.125, "interval95": None, "n": 1, "paired": False}
    assert compare.main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["test/score", "0.8750", "1.000", "(highest)", "+0.1250"] in lines
    assert ["one", "[b]o<b>"] in lines


def test_runs_are_found_by_path_and_by_folder(tmp_path: Path):
    for name in ("a1", "a2", "b1"):
        make_run(tmp_path / name)
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to("a1")
    a1, b1 = tmp_path / "a1", tmp_path / "b1"
    assert [path.name for path in compare.find_runs([b1, tmp_path, a1])] == ["b1", "a1", "a2"]
    for path in (tmp_path / "c", tmp_path / "d", Path("nowhere/**x")):
        with pytest.raises(ConfigError, match="no such run"):
            compare.find_runs([a1, path])
    for others in ([], [tmp_path / "link"], [b1 / "../a1"]):
        with pytest.raises(ConfigError, match="is one run; name at least two"):
            compare.find_runs([a1, *others])
