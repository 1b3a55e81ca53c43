"""report.html: what it shows, what it leaves out, and that it never ends a run."""

import base64
import gzip
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from library.tests.programs import environment
from library.tests.report.fake import make_run
from samestep.report import charts, page, summary
from samestep.report.files import MAX_BYTES, MAX_TEXT, read_predictions, read_run
from samestep.run import record

SCRIPT = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def report(run_dir: Path) -> Page:
    return Page(page.write(run_dir).read_text())


def test_the_page_shows_a_run(tmp_path: Path):
    run_dir = make_run(tmp_path / "one", words=("model.optimizer.lr=0.25", "data=points"))
    html = report(run_dir)
    for text in (
        "finished", "test/score", "0.8750", "0.7000 in epoch 3", "6.0 s", "points/s", "100.0",
        "points", "abc", "2.15.0", "node",
        "RUN_ID=one python train.py model.optimizer.lr=0.25 data=points trainer.max_epochs=6",
    ):  # fmt: skip
        assert text in html.text, text
    assert "What is missing" not in html.text
    # loss has two curves, and stands first; what is about the machine comes last.
    titles = [figure["aria-label"] for figure in html.all("figure")]
    assert titles == ["loss", "score", "lr", "points_per_second", "time/epoch_s"]


def test_the_curves_are_data_with_the_best_epoch(tmp_path: Path):
    html = report(make_run(tmp_path / "one"))
    data = [json.loads(a["data-chart"]) for a in html.all("div") if "data-chart" in a]
    assert data[0] == {
        "title": "loss", "axis": "epoch",
        "curves": [
            {"name": "train/loss", "mean": "", "run": 0, "best": 30, "x": [10, 20, 30],
             "y": [1.0, 0.5, 0.333333]},
            {"name": "val/loss", "mean": "", "run": 0, "best": 30, "x": [10, 20, 30],
             "y": [0.5, 0.333333, 0.25]},
        ],
        "ends": [{"epoch": [1.0, 2.0, 3.0], "step": [10.0, 20.0, 30.0], "time": [2.0, 4.0, 6.0]}],
    }  # fmt: skip
    assert data[2]["curves"][0]["best"] is None, "the learning rate is no result"


def test_single_steps_are_behind_the_mean_of_their_epoch(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    lines = ["epoch,step,time/epoch_s,step/loss,train/loss,train/loss_epoch,val_loss"]
    for step in range(8):
        end = f"2,1.0,{step},{4 - step / 2},0.5" if step % 4 == 3 else f",,{step},,"
        lines.append(f"{step // 4},{step},{end}")
    # An epoch that is not over.
    lines.append("2,8,,,8,,")
    (run_dir / "metrics.csv").write_text("\n".join(lines))
    loss, of_steps, _ = charts.charts_of([read_run(run_dir)])
    assert (loss.title, loss.axis) == ("loss", "epoch")
    curves = {curve["name"]: (curve["mean"], curve["x"], curve["best"]) for curve in loss.curves}
    assert curves == {
        "train/loss of single steps": ("train/loss", [1, 2, 3, 4, 5, 6, 7, 8, 9], None),
        "train/loss": ("", [4, 8], None),
        "val_loss": ("", [4, 8], None),
    }
    assert loss.ends == [{"epoch": [1, 2], "step": [4, 8], "time": [2, 4]}]
    # One value in each epoch is still a value of a step.
    assert (of_steps.title, of_steps.axis) == ("step/loss", "step")
    both = [read_run(run_dir), read_run(make_run(tmp_path / "two"))]
    drawn = charts.charts_of(both)
    assert not any("single steps" in chart.title for chart in drawn), "they would hide the means"
    (train,) = (chart for chart in drawn if chart.title == "train/loss")
    assert [(curve["name"], len(curve["x"])) for curve in train.curves] == [("one", 2), ("two", 3)]


def test_over_steps_the_end_of_the_best_epoch_is_marked(tmp_path: Path):
    """As of a plain LightningModule, which logs its training loss each few steps."""
    run_dir = make_run(tmp_path / "one")
    rows = [f"{step // 4},{step},{9 - step},{4 if step % 4 == 3 else ''}" for step in range(16)]
    (run_dir / "metrics.csv").write_text("\n".join(["epoch,step,train_loss,val_loss", *rows]))
    (chart,) = charts.charts_of([read_run(run_dir)])
    assert chart.axis == "step"
    assert [(curve["name"], curve["best"]) for curve in chart.curves] == [
        ("train_loss", 12), ("val_loss", 12),
    ]  # fmt: skip


def test_the_learning_rate_is_drawn_once(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    rows = ["epoch,step,lr,step/lr,val/loss,note/small"]
    rows += [
        f"{n // 4},{n},{0.1 if n % 4 == 3 else ''},{0.1 / (n + 1)},,{10.0**-n}" for n in range(8)
    ]
    (run_dir / "metrics.csv").write_text("\n".join(rows))
    assert [chart.title for chart in charts.charts_of([read_run(run_dir)])] == [
        "note/small", "step/lr",
    ]  # fmt: skip
    # A short run may have no step at which it is logged: of several runs it is the same column.
    others = [make_run(tmp_path / name, lr=0.5) for name in ("two", "three", "four")]
    runs = [read_run(path) for path in (run_dir, *others)]
    drawn = {chart.title: len(chart.curves) for chart in charts.charts_of(runs)}
    assert (drawn["lr"], "step/lr" in drawn) == (4, False)


def test_notes_and_tags_are_shown(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    record.update(run_dir, record.FINISHED, notes=SCRIPT, tags=["baseline", 3])
    text = report(run_dir).text
    assert SCRIPT in text
    assert "baseline 3" in " ".join(text.split())


def test_one_table_has_what_differs_from_the_defaults(tmp_path: Path):
    overridden = {"model.optimizer.lr": "the command line", "data": "experiment/<x>.yaml",
                  "run_root": "the command line", "model.gone": "the command line"}  # fmt: skip
    run_dir = make_run(tmp_path / "one", overridden=overridden)
    assert page.changed_in(read_run(run_dir)) == [
        ("model.optimizer.lr", "0.25", "the command line"),
        ("data", "points", "experiment/<x>.yaml"),
        ("model.gone", "null", "the command line"),
    ]
    html = report(run_dir)
    assert "What differs from the defaults" in html.text
    assert "experiment/<x>.yaml" in html.text


def test_the_page_needs_no_other_file(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    (run_dir / "predictions").mkdir()
    (run_dir / "predictions/a.png").write_bytes(b"\x89PNG")
    html = report(run_dir)
    assert not any("src" in script for script in html.all("script"))
    addresses = [a.get(name) for _, a in html.tags for name in ("src", "href", "xlink:href")]
    assert {address[:5] for address in addresses if address and address[0] != "#"} == {"data:"}
    ids = [attributes["id"] for _, attributes in html.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in html.all("a")} <= set(ids)


def test_people_who_do_not_see_the_page_can_use_it(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    (run_dir / "predictions").mkdir()
    (run_dir / "predictions/seen.png").write_bytes(b"\x89PNG")
    (run_dir / "predictions/seen.txt").write_text("What was seen\nTwo points & a line.\n")
    (run_dir / "predictions/counts.csv").write_text("name,number\na,1\n")
    html = report(run_dir)
    assert html.all("html")[0]["lang"] == "en"
    assert [img["alt"] for img in html.all("img")] == ["Two points & a line."]
    assert "What was seen" in html.text
    assert len(html.all("caption")) == len(html.all("table")) >= 4
    assert all("scope" in heading for heading in html.all("th"))
    levels = [int(tag[1]) for tag, _ in html.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(new <= old + 1 for old, new in itertools.pairwise(levels))
    drawings = [a for a in html.all("div") if a.get("class") == "plot"]
    assert drawings
    assert all(
        a["aria-hidden"] == "true" for a in drawings
    )  # the browser describes it beside, see tests/scripts


def test_texts_are_escaped(tmp_path: Path):
    run_dir = make_run(tmp_path / "one", words=(f"model.names={SCRIPT}",))
    (run_dir / "predictions").mkdir()
    (run_dir / "predictions/generated.txt").write_text(SCRIPT)
    (run_dir / "predictions/counts.csv").write_text(f"name\n{SCRIPT}\n")
    rows = (run_dir / "metrics.csv").read_text().replace("val/score", f"val/{SCRIPT}")
    (run_dir / "metrics.csv").write_text(rows)
    (run_dir / "metrics.json").write_text(json.dumps({f"test/{SCRIPT}": 1.0}))
    html = report(run_dir)
    assert len(html.all("script")) == 3  # ours
    assert html.text.count(SCRIPT) >= 6


def test_a_curve_of_many_steps_stays_small(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    lines = [f"{step // 1000},{step},{step % 7}" for step in range(100_000)]
    (run_dir / "metrics.csv").write_text("\n".join(["epoch,step,train/loss_step", *lines]))
    path = page.write(run_dir)
    assert path.stat().st_size < 300_000 + len(charts.plotly_text())
    (chart,) = charts.charts_of([read_run(run_dir)])
    assert (chart.title, chart.axis, chart.curves[0]["x"][-1]) == ("loss", "step", 100_000)


def test_plotly_is_packed_in_the_page_and_not_imported(tmp_path: Path):
    """The page costs each run 2 MB, and no import of half a second."""
    text = page.write(make_run(tmp_path / "one")).read_text()
    (packed,) = re.findall('id="plotly">([^<]*)<', text)
    program = gzip.decompress(base64.b64decode(packed)).decode()
    assert "plotly.js v" in program[:200]
    assert len(packed) < 0.45 * len(program)


def test_large_files_are_only_named(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    folder = run_dir / "predictions"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"x" * (MAX_BYTES // 2))
    (folder / "b.png").write_bytes(b"x" * (MAX_BYTES // 2 + 2))
    (folder / "test.csv").write_text("id\n" + "1\n" * MAX_TEXT)
    (folder / "bad.csv").write_bytes(b"\xff\xfe\x00")
    (folder / "good.csv").write_text('id,text\n1,"two\nlines"\n')
    (folder / "model.bin").write_bytes(b"")
    shown = {item.title: item for item in read_predictions(run_dir)}
    assert shown.keys() == {"a.png", "b.png", "test.csv", "bad.csv", "good.csv"}
    assert shown["a.png"].source.startswith("data:image/png;base64,")
    assert shown["b.png"].text == "b.png is too large for this page; open the file itself"
    assert shown["test.csv"].text.startswith("test.csv is too large")
    assert "\N{REPLACEMENT CHARACTER}" in shown["bad.csv"].rows[0][0]
    assert shown["good.csv"].rows == [["id", "text"], ["1", "two\nlines"]]
    assert page.write(run_dir).stat().st_size < 3_000_000 + len(charts.plotly_text())


def test_a_matrix_and_small_pictures_are_drawn_from_tables(tmp_path: Path):
    folder = make_run(tmp_path / "one") / "predictions"
    folder.mkdir()
    tables = {
        "counts": "truth / guess,cat,dog\ncat,3,1\ndog,0,4\n",
        "tiles": 'picture,guess\n"data:image/png;base64,AA==",cat\nhttps://example.org/x.png,dog\n',
        "words": "name,number\na,1\n",
        "long": f"picture,guess\n{'x' * 200_000},cat\n",
        "empty": "",
        "blank": "\n",
    }
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)
    (folder / "counts.txt").write_text("How many\nThree cats & four dogs.\n")
    (folder / "tiles.txt").write_text("Seen\n")
    (folder / "words.txt").write_text("Numbers\nOne of them.\n")
    html = report(folder.parent)
    (matrix,) = (figure for figure in html.all("figure") if figure.get("class") == "matrix")
    assert json.loads(matrix["data-table"]) == [
        ["truth / guess", "cat", "dog"], ["cat", "3", "1"], ["dog", "0", "4"]
    ]  # fmt: skip
    for text in ("guess cat", "How many", "Three cats & four dogs.", "Seen", "One of them."):
        assert text in html.text, text
    sources = {img["src"] for img in html.all("img")}
    assert "data:image/png;base64,AA==" in sources
    assert "https://example.org/x.png" not in sources, "it must not ask a server"
    shown = {item.title: item for item in read_predictions(folder.parent)}
    assert [*shown] == ["blank.csv", "How many", "empty.csv", "long.csv", "Seen", "Numbers"]
    assert shown["Numbers"].rows == [["name", "number"], ["a", "1"]]
    assert shown["Numbers"].text == "One of them."
    assert shown["long.csv"].text.startswith("long.csv is too large")


@pytest.mark.parametrize("name", ["metrics.json", "metrics.csv", "run.json", "config.yaml"])
@pytest.mark.parametrize("content", [None, b"", b"\xff[1", b"[1, 2]", b"{}"])
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path, name, content, monkeypatch):
    monkeypatch.setattr(charts, "plotly_text", str)
    run_dir = make_run(tmp_path / "one")
    (run_dir / name).unlink()
    if content is not None:
        (run_dir / name).write_bytes(content)
    text = report(run_dir).text
    if name == "run.json":
        assert "finished" in text  # the results say so too
    assert "What is missing" in text
    assert name in text
    if name == "metrics.csv":
        is_damaged = "metrics.csv is damaged: it has no columns epoch and step" in text
        assert is_damaged == (content in (b"", b"[1, 2]", b"{}"))
        assert ("metrics.csv is damaged: " in text) == (content is not None)


@pytest.mark.parametrize("command", [3, None, ["train.py", None, 4], []])
def test_values_of_a_wrong_kind_are_left_out(tmp_path: Path, command, monkeypatch):
    monkeypatch.setattr(charts, "plotly_text", str)
    run_dir = make_run(tmp_path / "one")
    (run_dir / "metrics.json").write_text('{"test/score": "odd one", "val/score": [1]}')
    (run_dir / "run.json").write_text(json.dumps({"starts": [4, {"command": command}]}))
    assert "odd one" not in report(run_dir).text


@pytest.mark.program
def test_a_run_that_still_trains_has_a_report(tmp_path: Path):
    run_dir = make_run(tmp_path / "one", words=("trainer.max_epochs=9",))
    (run_dir / "metrics.json").unlink()
    record.update(run_dir, record.RUNNING, epoch=3)
    assert "killed, or its machine was lost" in report(run_dir).text
    lock = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
    command = [sys.executable, "-c", f"{lock} print(flush=True); input()", run_dir / ".claim"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        process.stdout.readline()
        html = report(run_dir)
        process.communicate(b"\n")
    assert "metrics.json is absent or damaged" in html.text
    assert "RUN_ID=one python train.py trainer.max_epochs=9\n" in html.text


def test_the_timeline_has_every_start_and_end_and_repeated_steps(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    starts = [{"started": f"2026-11-22T0{hour}:00:00+00:00", "hostname": "node", "world_size": 2,
               "command": ["train.py"]} for hour in (1, 3, 5)]  # fmt: skip
    ends = [
        {"time": "2026-11-22T03:00:00+01:00", "state": "stopped", "why": "SIGTERM", "step": 7},
        {"time": "2026-11-22T06:00:00+00:00", "state": "finished", "why": "", "step": 30},
    ]
    repeats = [
        {"time": "2026-11-22T03:10:00+00:00", "result": "equal", "step": 5, "batches": 3},
        {"time": "2026-11-22T05:10:00+00:00", "result": "different", "note": "step 9 is repeated"},
    ]
    record.update(run_dir, record.RUNNING, starts=starts, ends=ends, repeats=repeats)
    text = page.write(run_dir).read_text()
    started = ("started", "2 rank(s), node: train.py")
    assert re.findall("<td>([a-z]+)</td><td>([^<]*)</td></tr>", text) == [
        started, ("stopped", "after step 7, SIGTERM"), started,
        ("repeated", "3 batches from step 5 on, equal"), started,
        ("repeated", "step 9 is repeated"),
        ("finished", "after step 30"),
    ]  # fmt: skip
    assert summary.facts_of(read_run(run_dir))["repeated steps"] == "step 9 is repeated"


def test_metrics_from_before_a_resume_are_not_final(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    record.update(run_dir, record.STOPPED, "SIGTERM", best=0.8, best_epoch=4)
    run = read_run(run_dir)
    assert run.final_metrics == {}
    (problem,) = run.problems
    assert problem.startswith("metrics.json and predictions are from before the run was resumed")
    assert summary.facts_of(run)["val/score"] == "0.8000 in epoch 4"
    assert "test/score" not in summary.facts_of(run)
    record.update(run_dir, record.FINISHED)
    assert summary.facts_of(read_run(run_dir))["test/score"] == "0.8750"


def test_a_report_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run_dir = make_run(tmp_path / "one")
    (run_dir / "report.html").mkdir()
    page.write_or_warn(run_dir)
    # Tests that ran before may have switched on lines of a lower level.
    (message,) = [line.message for line in caplog.records if line.levelname == "WARNING"]
    assert "report.html was not written: IsADirectoryError" in message
    assert f"samestep report {run_dir}" in message


@pytest.mark.program
def test_a_run_that_starts_and_a_comparison_without_repeats_wait_for_no_library(tmp_path: Path):
    runs = [str(make_run(tmp_path / name)) for name in ("one", "two")]
    program = (
        "import sys; from samestep.report import compare, page; "
        "heavy = {'matplotlib', 'plotly', 'jinja2', 'torch', 'scipy', 'numpy'}; "
        "print(heavy & sys.modules.keys()); compare.main(sys.argv[1:]); "
        "print(heavy & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program, *runs]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    first, *_, last = result.stdout.splitlines()
    assert (first, last) == ("set()", "set()"), result.stderr


def test_a_problem_names_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    run_dir = make_run(tmp_path / "one")
    (run_dir / "metrics.csv").write_text("epoch,step,a\n0,0,hunter2hunter2\n")
    (problem,) = read_run(run_dir).problems
    assert problem == "metrics.csv is damaged: could not convert string to float: '***'"
