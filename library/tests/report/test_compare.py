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


def compared(*run_dirs: Path) -> compare.Comparison:
    return compare.compare([read_run(path) for path in run_dirs])


def test_what_differs_in_the_configuration(tmp_path: Path):
    one = make_run(tmp_path / "one")
    other = make_run(tmp_path / "other", lr=0.5)
    found = compared(one, other).differences
    assert found == {"model.optimizer.lr": ["0.25", "0.5"]}  # and not run_id


def test_runs_that_differ_in_the_seed_are_repeats(tmp_path: Path):
    scores = [0.5, 0.75, 0.625]
    one = [make_run(tmp_path / f"a{n}", seed=n, score=s) for n, s in enumerate(scores)]
    other = [make_run(tmp_path / f"b{n}", seed=n, lr=1, score=s + 0.25 + n / 100)
             for n, s in enumerate(scores)]  # fmt: skip
    found = compared(*one, *other)
    assert [group.name for group in found.groups] == ["a0 (n = 3)", "b0 (n = 3)"]
    assert found.differences == {"model.optimizer.lr": ["0.25", "1"]}
    (value, none), (_, gap) = found.figures["test/score"]
    assert none is None
    wanted = stats.t.interval(0.95, 2, 0.625, stats.sem(scores))
    assert (value.mean - value.interval95, value.mean + value.interval95) == pytest.approx(wanted)
    # Each seed is compared with itself: the noise of the seeds drops out.
    assert gap.paired
    wanted = stats.t.interval(0.95, 2, 0.26, stats.sem([0.25, 0.26, 0.27]))
    assert gap.mean == pytest.approx(0.26)
    assert gap.interval95 == pytest.approx((wanted[1] - wanted[0]) / 2)
    (about, *_) = compare.tables(found).values()
    assert ["seeds", "0, 1, 2", "0, 1, 2"] in about


def test_runs_of_one_configuration_and_seed_are_shown_side_by_side(tmp_path: Path):
    """Such as those of changed code: none may take the place of the other."""
    runs = [make_run(tmp_path / name, score=score) for name, score in (("one", 0.5), ("two", 0.75))]
    found = compared(*runs)
    assert [group.name for group in found.groups] == ["one", "two"]
    (value, _), (other, gap) = found.figures["test/score"]
    assert (str(value), str(other), str(gap)) == ("0.5", "0.75", "0.25")
    more = [make_run(tmp_path / f"{name}1", seed=1, score=0.5 + n) for n, name in enumerate("ab")]
    found = compared(runs[0], *more, runs[1])
    assert [[run.name for run in group.runs] for group in found.groups] == [
        ["one", "a1"], ["b1", "two"],
    ]  # fmt: skip
    gap = found.figures["test/score"][1][1]
    assert gap.paired
    assert (gap.mean, gap.n) == (pytest.approx(0.625), 2)


def test_seeds_of_parts_are_seeds_too(tmp_path: Path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for number, run in enumerate(runs):
        with (run / "config.yaml").open("a") as file:
            file.write(f"data: {{seed: {number}}}\n")
    (group,) = compared(*runs).groups
    assert group.name == "one (n = 2)"
    assert len(group.values("test/score")) == 2


def test_an_unfinished_run_is_no_repeat_of_finished_ones(tmp_path: Path):
    runs = [make_run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    record.update(runs[1], record.STOPPED, "SIGTERM")
    found = compared(*runs)
    assert [group.name for group in found.groups] == [
        "a0 (n = 2)", "a1 (stopped, newest metrics)",
    ]  # fmt: skip
    assert found.figures["test/score"][0][0].n == 2
    assert found.figures["test/score"][1][0] is None, "of before it was continued"


def marks(run_dirs, figure="test/score"):
    """Each cell of a figure, with its mark."""
    rows = compare.tables(compared(*run_dirs))["Final figures, and differences from the first"]
    (row,) = (row for row in rows if row[0] == figure)
    return [(str(cell), cell.mark) for cell in row[1:]]


def test_the_best_value_is_marked_and_a_difference_beyond_chance_is_better_or_worse(tmp_path: Path):
    scores = {"a": [0.5, 0.75, 0.625], "b": [0.6, 0.7, 0.6], "c": [0.75, 1.0, 0.875]}
    runs = [
        make_run(tmp_path / f"{name}{n}", seed=n, score=score, lr=ord(name))
        for name, each in scores.items() for n, score in enumerate(each)
    ]  # fmt: skip
    assert marks(runs) == [
        ("0.625 ± 0.31", ""), ("0.63333 ± 0.14", ""), ("0.875 ± 0.31", "best"),
        ("+0.0083333 ± 0.2 paired", ""), ("+0.25 ± 0 paired", "better"),
    ]  # fmt: skip
    assert marks([runs[6], runs[0]])[-1] == ("-0.25", "worse")  # of one seed: no interval is known
    for run_dir in runs:
        record.update(run_dir, record.FINISHED, mode="min")
    assert marks([runs[6], runs[0]]) == [("0.75", ""), ("0.5", "best"), ("-0.25", "better")]
    for run_dir in runs:
        record.update(run_dir, record.FINISHED, monitor="val/other")
    assert marks([runs[6], runs[0]]) == [("0.75", ""), ("0.5", ""), ("-0.25", "")]


def test_less_loss_is_better_whatever_is_monitored(tmp_path: Path):
    runs = [make_run(tmp_path / name, lr=number) for number, name in enumerate(("one", "two"))]
    for run_dir, loss in zip(runs, (0.5, 0.25), strict=True):
        (run_dir / "metrics.json").write_text(f'{{"test/loss": {loss}}}')
    assert marks(runs, "test/loss") == [("0.5", ""), ("0.25", "best"), ("-0.25", "better")]


def test_tags_notes_and_states_are_compared(tmp_path: Path):
    runs = [make_run(tmp_path / name, lr=number) for number, name in enumerate(("one", "two"))]
    record.update(runs[1], record.STOPPED, "SIGTERM", tags=["a", "b"], notes="to try")
    rows = compare.tables(compared(*runs))["Runs"]
    assert rows == [
        ["", "one", "two (stopped, newest metrics)"], ["runs", "one", "two"],
        ["state", "finished", "stopped"], ["seeds", "0", "0"], ["tags", "", "a, b"],
        ["notes", "", "to try"],
    ]  # fmt: skip


def test_other_seeds_are_compared_by_their_means(tmp_path: Path):
    one, other = [0.5, 0.7, 0.6], [0.9, 0.8]
    runs = [make_run(tmp_path / f"a{n}", seed=n, score=s) for n, s in enumerate(one)]
    runs += [make_run(tmp_path / f"b{n}", seed=n, lr=1, score=s) for n, s in enumerate(other)]
    _, (_, gap) = compared(*runs).figures["test/score"]
    assert not gap.paired
    wanted = stats.ttest_ind(other, one, equal_var=False).confidence_interval(0.95)
    assert gap.mean == pytest.approx((wanted.low + wanted.high) / 2)
    assert gap.interval95 == pytest.approx((wanted.high - wanted.low) / 2)
    _, (value, gap) = compared(runs[0], runs[3]).figures["test/score"]
    assert (str(value), str(gap)) == ("0.9", "0.4")


def test_time_speed_and_scaling_efficiency(tmp_path: Path):
    one = make_run(tmp_path / "one", epoch_s=9.0)
    two = make_run(tmp_path / "two", epoch_s=6.0, world_size=2)
    found = compared(one, two)
    assert len(found.groups) == 2  # the same configuration, under torchrun
    costs = found.costs
    assert costs["ranks"] == ["1", "2"]
    assert (costs["epochs"], costs["steps"]) == (["3", "3"], ["30", "30"])
    assert costs["seconds of training"] == ["27", "18"]
    assert costs["points/s"] == ["100", "100"]
    assert costs["speedup"] == ["1", "1.5"]
    assert costs["scaling efficiency"] == ["100%", "75%"]


def test_an_unfinished_and_a_damaged_run_are_compared_as_far_as_known(tmp_path: Path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    (one / "metrics.json").unlink()
    for name in ("metrics.json", "metrics.csv", "run.json"):
        (other / name).write_text("damaged")
    found = compared(one, other)
    assert found.figures["val/score"][0][0].mean == 0.7  # its newest one
    assert "other: metrics.json is damaged" in compare.to_page(found)


def test_a_seed_of_a_wrong_kind_is_compared(tmp_path: Path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", lr=1)
    config = (other / "config.yaml").read_text().replace("seed: 0", "seed: [1]")
    (other / "config.yaml").write_text(config)
    assert str(compared(one, other).figures["test/score"][1][0]) == "0.875"


def test_metrics_of_plain_lightning_are_compared_and_share_a_chart(tmp_path: Path):
    runs = [make_run(tmp_path / name) for name in ("one", "other")]
    for run in runs:
        table = (run / "metrics.csv").read_text().replace("/loss", "_loss")
        (run / "metrics.csv").write_text(table)
        (run / "metrics.json").write_text('{"test_loss": 0.5, "time/total_s": 6}')
    found = compared(*runs)
    assert list(found.figures) == ["test_loss"]
    rows = found.groups[0].runs[0].rows
    (loss, *_) = charts.of_run(rows)
    assert [curve.name for curve in loss.curves] == ["train_loss", "val_loss"]


def test_json_and_markdown_have_the_same_figures(tmp_path: Path, capsys):
    found = compared(make_run(tmp_path / "one"), make_run(tmp_path / "[b]other", lr=1, score=1))
    plain = json.loads(json.dumps(compare.to_json(found)))
    value, gap = plain["figures"]["test/score"][1].values()
    assert value == {"mean": 1.0, "interval95": None, "n": 1, "paired": False}
    assert gap == {"mean": 0.125, "interval95": None, "n": 1, "paired": False}
    compare.print_tables(found, markdown=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["|", "test/score", "|", "0.875", "|", "**1**", "|", "+0.125", "|"] in lines
    assert ["|", "key", "|", "one", "|", "[b]other", "|"] in lines


def test_the_page_lays_the_curves_over_each_other(tmp_path: Path):
    found = compared(make_run(tmp_path / "one"), make_run(tmp_path / "o<b>ther", lr=1))
    text = compare.to_page(found)
    assert "one: 1 at first, 0.3333 at last" in text
    assert "<b>" not in text
    assert text.count("<h3>val/loss</h3>") == 1


def test_runs_are_found_by_path_by_glob_and_by_folder(tmp_path: Path):
    for name in ("a1", "a2", "b1"):
        make_run(tmp_path / name)
    (tmp_path / "c").mkdir()
    assert len(compare.find_runs([str(tmp_path)])) == 3
    found = compare.find_runs([f"{tmp_path}/a*", f"{tmp_path}/b1", f"{tmp_path}/a1"])
    assert [path.name for path in found] == ["a1", "a2", "b1"]
    for pattern in (f"{tmp_path}/c", f"{tmp_path}/d*", "", "nowhere/**x"):
        with pytest.raises(ConfigError, match="no such run"):
            compare.find_runs([f"{tmp_path}/a1", pattern])
    (tmp_path / "link").symlink_to("a1")
    for other in ([], [f"{tmp_path}/link"], [f"{tmp_path}/b1/../a1"]):
        with pytest.raises(ConfigError, match="is one run; name at least two"):
            compare.find_runs([f"{tmp_path}/a1", *other])
