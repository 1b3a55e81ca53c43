"""The page that a real run leaves, in a real browser."""

import html
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from library.tests.programs import PATIENCE_S
from library.tests.report.fake import make_run
from samestep.plugins import time_file
from samestep.report import live, page
from samestep.report.estimates import estimate_mean
from samestep.run import record
from tests.conftest import NO_PICTURES, QUICK, final_metrics, run

CHROMIUM = shutil.which("chromium")
THEMES = {"dark": 0, "light": 1}  # as Blink numbers them


@pytest.mark.program
def test_the_command_writes_the_page_again(digits_run: Path, tmp_path: Path):
    again = shutil.copytree(digits_run, tmp_path / digits_run.name)
    (again / page.NAME).unlink()
    result = run("-m", "samestep", "report", str(again))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{again / page.NAME}\n", "")

    def text_of(run_dir: Path) -> str:
        # The run writes its page before its last seconds are counted.
        text = (run_dir / page.NAME).read_text()
        return re.sub('<div class="bar".*?</ul>', "", text, flags=re.DOTALL)

    assert text_of(again) == text_of(digits_run)
    result = run("-m", "samestep", "report", str(tmp_path))
    assert result.returncode == 2
    assert "must be the directory of a run" in result.stderr


def test_the_page_of_a_run_is_small_and_has_all_its_parts(digits_run: Path):
    path = digits_run / page.NAME
    text = path.read_text()
    assert path.stat().st_size < 3_000_000
    for title in ("Most confident mistakes", "Confusion matrix"):
        assert f"<h3>{title}</h3>" in text
    charts = (
        "loss",
        "accuracy",
        "step/lr",
        "samples_per_second",
        "time/epoch_s",
        "system/cpu_cores",
    )
    for chart in (*charts, "system/memory_gib"):
        assert f"<h3>{chart}</h3>" in text
    assert "What is missing" not in text
    assert text.count("<td>the command line</td>") == len(QUICK) - 1  # without report=false


@pytest.mark.program
def test_a_run_that_is_stopped_or_fails_leaves_a_page_too(tmp_path: Path):
    words = [
        *QUICK, NO_PICTURES, "report=true", "model=mlp", f"run_root={tmp_path}",
        "+callbacks.signaller._target_=tests.signaller.Quiet",
        f"+callbacks.signaller.dirpath={tmp_path / 'seen'}",
        "+callbacks.loser._target_=tests.signaller.Loser",
    ]  # fmt: skip
    stopped = run("train.py", *words, RUN_ID="one", SIGNAL_AT=f"25 {signal.SIGTERM:d} 0 rank")
    assert stopped.returncode == 143, stopped.stderr
    text = (tmp_path / "one" / page.NAME).read_text()
    assert '"state stopped">stopped</span> SIGTERM' in text
    assert "<td>after step 26, SIGTERM</td>" in text

    # Between training and test no callback of Lightning learns of an error.
    failed = run("train.py", *words, RUN_ID="one", LOSE_BEST="1")
    assert failed.returncode == 1
    assert failed.stderr.count("error: ") == 1
    text = (tmp_path / "one" / page.NAME).read_text()
    assert '"state failed">failed</span>' in text
    assert "best.ckpt cannot be used: it is missing, or damaged" in text
    listed = run("-m", "samestep", "runs", str(tmp_path))
    assert "failed: checkpoints/best.ckpt cannot be used: it is missing" in listed.stdout


def chromium(*words: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    # Without a GPU and a sandbox, which a container has not.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    return subprocess.run(
        [CHROMIUM, *flags, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@in_a_browser
def test_a_browser_shows_the_page_in_both_themes(digits_run: Path, tmp_path: Path):
    address = (digits_run / page.NAME).as_uri()
    text = re.sub("<[^>]+>", " ", visit(tmp_path, address))
    assert f"{final_metrics(digits_run)['test/accuracy']:.4f}" in text
    brightness = {}
    for theme, number in THEMES.items():
        picture = tmp_path / f"{theme}.png"
        chromium(
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={number}", "--window-size=1200,900",
            f"--screenshot={picture}", address,
        )  # fmt: skip
        brightness[theme] = mean_of(picture)
    assert brightness["dark"] < 70 < 200 < brightness["light"]


WATCHED = """<script>
addEventListener("load", async () => {
  const seen = {}, wait = (what) => new Promise((done) => {
    const timer = setInterval(() => { if (what()) { clearInterval(timer); done(); } }, 20);
  });
  const places = [...document.querySelectorAll(".plot")], first = places[0];
  await wait(() => first.dataset.ready);
  await wait(() => places[5].data);
  seen.titles = places.map((place) => place.closest("figure").ariaLabel);
  seen.ticks = [...first.querySelectorAll(".xtick")].map((tick) => tick.textContent);
  seen.names = first.data.map((trace) => trace.name);
  seen.ranges = places.map((place) => place.layout?.yaxis.range);
  const values = first.closest("figure").querySelector(".values");
  values.open = true;
  await wait(() => values.querySelector("td"));
  const rows = [...values.querySelectorAll("tr")];
  seen.table = rows.map((row) => [...row.cells].map((cell) => cell.textContent));
  seen.unnamed = [...values.querySelectorAll("th")].filter((heading) => !heading.scope).length;
  values.open = false;
  dispatchEvent(new Event("beforeprint"));
  seen.printed = [...document.querySelectorAll(".charts:not(.machine *) .values")].map(
    (values) => values.open && values.querySelectorAll("tr").length);
  dispatchEvent(new Event("afterprint"));
  seen.left = document.querySelectorAll(".values[open]").length;
  const stars = first.data.filter((trace) => trace.marker?.symbol === "star");
  seen.stars = stars.map((trace) => trace.x[0]);
  document.querySelector(".machine").open = true;
  await wait(() => places.slice(0, 5).every((place) => place.dataset.ready));
  const set = (id, change) => {
    change(document.getElementById(id));
    document.getElementById(id).dispatchEvent(new Event("input", { bubbles: true }));
  };
  set("log", (box) => { box.checked = true; });
  seen.log = first.layout.yaxis.type;
  first.closest("figure").querySelector(".tools [name=log]").click();
  seen.linear = [first.layout.yaxis.type, places[1].layout.yaxis.type];
  seen.axes = ["step", "time", "epoch"].map((axis) => {
    set("axis", (select) => { select.value = axis; });
    return [first.layout.xaxis.title.text, [...first.data[0].x], first.data[1].x[0]];
  });
  seen.csv = csvOf(first.closest("figure"));
  const { data, layout } = first;
  seen.png = (await Plotly.toImage({ data, layout })).slice(0, 15);
  const matrix = document.querySelector(".matrix .plot").data[0];
  seen.matrix = [matrix.hovertext[1][0], matrix.z[0].length];
  set("smoothing", (range) => { range.value = 0.5; });
  seen.smooth = first.data[1].y;
  seen.behind = [first.data[0].y, first.data[0].opacity < 0.5];
  await Plotly.relayout(first, { "xaxis.range[0]": 1.5, "xaxis.range[1]": 2.5 });
  seen.zoomed = [first.layout.xaxis.range, first.layout.xaxis.tickmode];
  document.getElementById("reset").click();
  await wait(() => first.layout.xaxis.tickmode === "array");
  // What a keyboard can reach, and what hides from screen readers.
  const hidden = document.querySelectorAll("[aria-hidden] :is(a[href], button, input, [tabindex])");
  seen.reachableButHidden = hidden.length;
  seen.wide = document.documentElement.scrollWidth > innerWidth;
  // A word of one line has one rectangle.
  const isBroken = (element) => {
    const range = document.createRange();
    range.selectNode(element.lastChild);
    return range.getClientRects().length > 1;
  };
  seen.words = [...document.querySelectorAll("tr code, .key li, .timeline time")].map(
    (word) => [word.textContent.trim(), isBroken(word)]);
  seen.width = innerWidth;
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>"""


@in_a_browser
@pytest.mark.parametrize("width", [1200, 400])
def test_curves_have_zoom_smoothing_a_logarithmic_axis_and_the_best_epoch(tmp_path: Path, width):
    key = "callbacks.checkpoints.every_n_train_steps"
    run_dir = make_run(tmp_path / "one", overridden={key: "the command line"})
    seconds = dict.fromkeys(time_file.CAUSES, 1.0)
    spent = time_file.Start(
        began=0.0, away=0.0, first_step=0, step=30, device="cpu", num_ranks=1, seconds=seconds
    )
    start = {**record.read(run_dir).start, "spent": spent._asdict()}
    record.update(run_dir, record.FINISHED, starts=[start])
    (run_dir / "predictions").mkdir()
    (run_dir / "predictions/counts.csv").write_text("truth / guess,cat,dog\ncat,3,1\ndog,1,4\n")
    path = page.write(run_dir)
    path.write_text(path.read_text().replace("</body>", f"{WATCHED}</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(frame_of(path.as_uri(), width))
    seen = look(tmp_path, frame.as_uri(), width)
    charts = ["loss", "score", "lr", "points_per_second", "time/epoch_s"]
    assert seen["titles"] == [*charts, "counts.csv"]
    assert seen["ticks"] == ["1", "2", "3"]
    assert seen["names"][0] == "train/loss"
    assert seen["ranges"][2] == [0.125, 0.375], "a constant lr of 0.25 is no line at 0"
    assert seen["stars"] == [3, 3]
    assert seen["table"] == [
        ["epoch", "train/loss", "val/loss"], ["1", "1.0000", "0.50000"],
        ["2", "0.5000", "0.33333"], ["3", "★ 0.3333", "★ 0.25000"],
    ]  # fmt: skip
    assert seen["unnamed"] == 0
    assert seen["printed"] == [4, 4, 4], "on paper every curve has its table"
    assert seen["left"] == 0
    assert seen["log"] == "log"
    assert seen["linear"] == ["linear", "log"]
    assert seen["axes"] == [
        ["step", [10, 20, 30], 30], ["time, s", [2, 4, 6], 6], ["epoch", [1, 2, 3], 3],
    ]  # fmt: skip
    assert seen["csv"] == (
        "step,train/loss,val/loss\n10,1,0.5\n20,0.5,0.333333\n30,0.333333,0.25\n"
    )
    assert seen["png"] == "data:image/png;"
    assert seen["matrix"] == ["truth dog, guess cat: 1 of 5 (20.0 %)", 2]
    assert seen["smooth"] == pytest.approx([1, 2 / 3, 10 / 21], abs=1e-5)
    assert seen["behind"] == [[1, 0.5, 0.333333], True], "the raw curve"
    assert seen["zoomed"] == [[1.5, 2.5], "auto"]
    assert seen["reachableButHidden"] == 0
    assert not seen["wide"]
    words = dict(seen["words"])
    assert {key, "training 10.0 %"} <= words.keys()
    assert not any(words.values()), "nothing breaks in the middle of a name"


@in_a_browser
def test_the_live_page_follows_a_run_and_keeps_what_is_ticked(tmp_path: Path):
    """A run trains on while the page asks for news: an epoch for each question."""
    run_dir = make_run(tmp_path / "runs/one")
    make_run(tmp_path / "runs/two", lr=1, score=1)
    asked = []

    class Trains(live.Handler):
        def do_GET(self):
            if self.path.startswith("/data"):
                asked.append(self.path)
                with (run_dir / "metrics.csv").open("a") as file:
                    file.write(f"{2 + len(asked)},{29 + 10 * len(asked)},0.1,0.1,0.5,,,\n")
            super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Trains, tmp_path / "runs")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/?run=one&run=two"
        shown = visit(tmp_path, address, "--virtual-time-budget=20000")
        server.shutdown()
    assert len(asked) > 2
    assert asked[-1] == "/data?run=one&run=two"
    chart = re.search('data-chart="([^"]*train/loss[^"]*)"', shown)[1]
    curves = json.loads(chart.replace("&quot;", '"'))["curves"]
    assert [curve["name"] for curve in curves] == ["one", "two"], "both runs in each chart"
    assert curves[0]["x"][-1] > 5, "more than the first answer"
    assert "2 of 2 runs; 2 ticked" in shown
    assert shown.count('class="main-svg"') > 4
    assert "val/score" in re.sub("<[^>]+>", " ", shown)
    assert '<td class="highest">1.000 <small>highest</small></td>' in shown


CLICKED = """<script>
addEventListener("load", async () => {
  const wait = (what) => new Promise((done) => {
    const timer = setInterval(() => { if (what()) { clearInterval(timer); done(); } }, 20);
  });
  const names = () => [...document.querySelectorAll("#list tbody input")].map((box) => box.value);
  const numCurves = () => {
    const place = document.querySelector(".plot[data-chart]");
    return place ? JSON.parse(place.dataset.chart).curves.length : 0;
  };
  const say = (what) => {
    const filter = document.getElementById("filter");
    filter.value = what;
    filter.dispatchEvent(new Event("input", { bubbles: true }));
    return names();
  };
  const seen = {};
  await wait(() => names().length && window.Plotly);
  const list = document.querySelector("#list .scroll");
  seen.hidden = list.scrollWidth - list.clientWidth;
  // The answer of a request that was sent before the clicks comes after all others.
  const ask = window.fetch, late = [];
  let isHeld = true;
  window.fetch = async (address) => {
    const answer = await ask(address);
    if (isHeld) await new Promise((done) => late.push(done));
    return answer;
  };
  refresh();
  await wait(() => late.length);
  isHeld = false;
  const first = document.querySelector("#list tbody tr");
  for (const box of document.querySelectorAll("#list tbody input")) box.click();
  await wait(() => numCurves() === 20);
  late[0]();
  await new Promise((done) => setTimeout(done, 500));
  seen.ticked = [ticked.size, document.querySelectorAll("#list input:checked").length, numCurves()];
  seen.isSameRow = document.contains(first);
  seen.lines = document.querySelector(".parallel").data.length;
  const { data } = document.querySelector(".plot");
  seen.markers = data.filter((trace) => trace.mode.includes("markers")).length;
  const boxOf = (element) => element.getBoundingClientRect();
  const lastHead = boxOf(document.querySelector("#list thead th:last-child"));
  // A wide table scrolls; on a phone all headings must be in sight.
  const isInside = lastHead.left >= 0 && (innerWidth > 640 || lastHead.right <= innerWidth);
  seen.canSort = isInside && lastHead.bottom <= boxOf(first.parentElement.rows[0]).top + 1;
  const titles = [...document.querySelectorAll(".parallel .annotation-text")].filter(
    (text) => text.textContent.endsWith("_key"));
  seen.titles = titles.map((text) => text.textContent);
  seen.doTitlesOverlap = boxOf(titles[0]).right > boxOf(titles[1]).left;
  seen.filtered = [say("lr=0.5 seed-1"), say("baseline").length, say("failed"), say("nothing")];
  say("");
  document.querySelector("[data-sort=best]").click();
  seen.lowest = names()[0];
  document.querySelector("[data-sort=best]").click();
  seen.highest = names()[0];
  document.getElementById("all").click();
  seen.none = ticked.size;
  document.querySelector("#list [data-repeats]").click();
  seen.repeats = [...ticked].sort();
  document.getElementById("all").click();
  document.getElementById("all").click();
  const groupedBy = (key) => {
    const choice = document.getElementById("group");
    choice.value = key;
    choice.dispatchEvent(new Event("change", { bubbles: true }));
    const heads = [...document.querySelectorAll("#list .group")];
    return heads.map((head) => [...head.cells].slice(0, 3).map((cell) => cell.textContent.trim()));
  };
  seen.seeds = groupedBy("seed");
  document.querySelector("[data-sort=best]").click();
  seen.order = groupedBy("seed").map(([title]) => title);
  const head = document.querySelector("#list .group");
  head.querySelector("input").click();
  seen.tickedGroup = [...ticked].sort();
  head.querySelector("button").click();
  const member = document.querySelector("#list tbody tr:not(.group)");
  await refresh();
  seen.isSameGroup = document.contains(head) && document.contains(member);
  seen.tickedMembers = document.querySelectorAll("#list tbody tr:not(.group) input:checked").length;
  seen.tags = groupedBy("tags");
  say("baseline");
  seen.filtered.push(groupedBy("state"));
  seen.address = location.search;
  say("");
  groupedBy("");
  seen.ungrouped = names().length;
  seen.width = innerWidth;
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>"""


@in_a_browser
@pytest.mark.parametrize("width", [1200, 400])
def test_clicks_on_a_long_list_are_kept_while_it_is_refreshed(tmp_path: Path, width: int):
    for number in range(20):
        name = f"digits-cnn-with-a-longer-name-{number}-seed-{number % 2}"
        run_dir = make_run(tmp_path / "runs" / name, seed=number % 2, lr=0.5 + number // 2)
        with (run_dir / "config.yaml").open("a") as file:
            file.write(f"first_other_key: {number // 2}\nfourth_other_key: {number // 2}\n")
        tags = ["baseline"] * (number < 3)
        state = record.FAILED if number == 7 else record.FINISHED
        monitor = "val/other" if number == 7 else "val/score"
        record.update(run_dir, state, best=number / 20, tags=tags, monitor=monitor)

    class Watched(live.Handler):
        def do_GET(self) -> None:
            if self.path == "/frame":
                super()._send_text("text/html", frame_of("/", width))
            else:
                super().do_GET()

        def _send_text(self, content_type: str, text: str) -> None:
            super()._send_text(content_type, text.replace("</body>", f"{CLICKED}</body>"))

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Watched, tmp_path / "runs")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/frame"
        seen = look(tmp_path, address, width)
        server.shutdown()
    prefix = "digits-cnn-with-a-longer-name"
    assert seen["ticked"] == [20, 21, 20], "the box for all, too"
    assert seen["isSameRow"], "a click on a row that is replaced would be lost"
    assert seen["lines"] == 19, "values of another metric have no place on its axis"
    assert seen["markers"] == 0, "points and stars would hide 20 curves"
    assert seen["canSort"]
    assert seen["titles"] == ["first_other_key", "fourth_other_key"]
    assert not seen["doTitlesOverlap"]
    assert seen["filtered"] == [
        [f"{prefix}-1-seed-1"], 3, [f"{prefix}-7-seed-1"], [],
        [["state finished: 3 runs", "3 finished", mean_over([0, 1, 2])]],
    ]  # fmt: skip
    assert (seen["lowest"], seen["highest"]) == (f"{prefix}-0-seed-0", f"{prefix}-19-seed-1")
    assert seen["none"] == 0
    assert seen["repeats"] == [f"{prefix}-18-seed-0", f"{prefix}-19-seed-1"]
    # The highest mean is first, and the failed run has no part in it.
    finished = [number for number in range(20) if number != 7]
    assert seen["seeds"] == [
        ["seed 1: 10 runs", "9 finished, 1 failed", mean_over([n for n in finished if n % 2])],
        ["seed 0: 10 runs", "10 finished", mean_over(range(0, 20, 2))],
    ]
    assert seen["order"] == ["seed 0: 10 runs", "seed 1: 10 runs"], "as the values of the column"
    assert seen["tickedGroup"] == sorted(f"{prefix}-{n}-seed-0" for n in range(0, 20, 2))
    assert seen["isSameGroup"]
    assert seen["tickedMembers"] == 10
    assert seen["tags"] == [
        ["tags baseline: 3 runs", "3 finished", mean_over([0, 1, 2])],
        ["tags none: 17 runs", "16 finished, 1 failed", mean_over(finished[3:])],
    ]
    assert "group=state" in seen["address"]
    assert seen["ungrouped"] == 20
    if width == 400:
        assert seen["hidden"] == 0


def mean_over(numbers: Iterable[int]) -> str:
    """The mean of these runs as the server would show it; the browser computes its own."""
    estimate = estimate_mean({str(number): number / 20 for number in numbers})
    return f"{estimate.text()} (n = {estimate.n})"


def visit(tmp_path: Path, address: str, *flags: str) -> str:
    """What a browser has made of a page; nothing must go wrong in it."""
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = chromium(profile, "--virtual-time-budget=10000", *flags, "--dump-dom", address)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return shown.stdout


def frame_of(address: str, width: int) -> str:
    """A page with another one in a frame: a window of Chromium has at least 500 pixels."""
    return (
        f'<body><iframe src="{address}" width="{width}" height="900" style="border: 0"></iframe>'
        '<script>addEventListener("message", (event) => {'
        " document.body.dataset.seen = event.data; });</script>"
    )


def look(tmp_path: Path, address: str, width: int) -> dict[str, Any]:
    """What the script in the framed page has seen at this width."""
    dom = visit(tmp_path, address, "--window-size=1300,1000")
    seen = json.loads(html.unescape(re.search('data-seen="([^"]*)"', dom)[1]))
    assert seen["width"] == width
    return seen


def mean_of(picture: Path) -> float:
    """The mean brightness, from 0 to 255."""
    import numpy as np
    from PIL import Image

    with Image.open(picture) as image:
        return float(np.asarray(image.convert("L")).mean())
