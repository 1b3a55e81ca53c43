"""Write report.html, one page about a run. The run may still be training.

samestep report runs/mine
samestep report --serve
samestep report --serve /volume/runs --port 8000

--serve shows all runs of a folder in a browser of this machine, while they train, and compares
those that are ticked.
"""

import itertools
import json
import os
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from samestep.command_line import RUN_DIR, Parser
from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.report import charts, compare, listing, overview, page
from samestep.report.estimates import quantiles
from samestep.report.files import Run, Stamp, read_run, stamp_of
from samestep.run import lock, record

HOSTS = {"127.0.0.1", "localhost"}
MAX_LISTED = 500  # the newest runs
FILES = ("config.yaml", "metrics.csv", "metrics.json", record.FILE)


def main(argv: Sequence[str]) -> int:
    """Write the page of a run, and print where it is; or serve the pages of all runs."""
    parser = Parser("samestep report", __doc__)
    parser.usage = f"{parser.prog} run_dir\n       {parser.prog} --serve [--port N] [folder]"
    # A run, or a folder of runs: an error names what is expected.
    text = f"{RUN_DIR}; with --serve the folder of the runs, default: runs"
    parser.add_argument("place", nargs="?", default="", metavar="run_dir or folder", help=text)
    text = "show all runs of a folder in a browser, while they train"
    parser.add_argument("--serve", action="store_true", help=text)
    text = "of --serve, on 127.0.0.1; default: any free one"
    parser.add_argument("--port", type=int, metavar="N", help=text)
    arguments = parser.parse(argv)
    environment.limit_threads()
    if arguments.serve:
        serve(Path(arguments.place or "runs"), arguments.port or 0)
        return 0
    if arguments.port is not None:
        parser.error("--port: only together with --serve")
    print(page.write(parser.read_run_dir(arguments.place)))
    return 0


def serve(folder: Path, port: int) -> None:
    """Show the runs of a folder until the program is interrupted; port 0 is any free one.

    Raises:
        ConfigError: if there is no such folder, or the port cannot be used.
    """
    # Raises now if the folder is missing, not at the first request.
    listing.list_runs(folder)
    try:
        # 127.0.0.1, and no option for another address: there is no password.
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, folder))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port}: {error}; leave it out for a free one") from error
    with server:
        print(f"http://127.0.0.1:{server.server_port}/ shows {folder}. Ctrl-C ends it", flush=True)
        server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    def __init__(self, folder: Path, *arguments: Any) -> None:
        self.folder = folder
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page, its data, the report of one run, or Plotly."""
        # A website can give its own name the address 127.0.0.1 (DNS rebinding), and its scripts
        # could then read the runs through this browser. Such a request names that website here.
        if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "ask for localhost")
            return
        address = urlsplit(self.path)
        path = unquote(address.path)
        if path == "/":
            self._send_text("text/html", render_page(self.folder))
        elif path == "/data":
            names = parse_qs(address.query).get("run", [])
            self._send_text("application/json", render_parts(self.folder, names))
        elif path == "/plotly.js":
            # As it lies in memory: every browser unpacks it.
            self._send("text/javascript", charts.plotly_gz(), ("Content-Encoding", "gzip"))
        elif path.startswith("/report/"):
            self._send_report(path.removeprefix("/report/"))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_report(self, name: str) -> None:
        runs = find_runs(self.folder, [name])
        if runs:
            self._send_text("text/html", page.page_of(runs[0]))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_text(self, content_type: str, text: str) -> None:
        self._send(content_type, text.encode())

    def _send(self, content_type: str, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        # A page that was closed meanwhile is no error worth a traceback in the terminal.
        with suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the page asks every two seconds."""


def render_page(folder: Path) -> str:
    """The page, which asks for everything that changes."""
    template = page.templates().get_template("live.html")
    # The browser groups the runs, so that a choice shows at once, and needs no scipy for it.
    return template.render(title=f"Runs in {folder}", quantiles=quantiles(MAX_LISTED))


def find_runs(folder: Path, names: Sequence[str]) -> list[Run]:
    """The runs of these names in the folder; other names are ignored."""
    runs = []
    for name in dict.fromkeys(names):
        # Names come from the address: one such as ../outside must not leave the folder.
        is_plain = Path(name).name == name
        if is_plain and (folder / name / "config.yaml").is_file():
            runs.append(read_run(folder / name))
    return runs


def render_parts(folder: Path, names: Sequence[str]) -> str:
    """What the page asks for, as JSON.

    A page that is left open asks again and again, on a machine that trains. Unchanged runs cost it
    a look at one file each.

    Args:
        folder: of all runs.
        names: of the runs that are ticked.

    Returns:
        ``list``: the newest runs, see ``describe_runs``, and in ``num`` how many there are.
        ``comparison`` and ``charts`` of the ticked ones, as HTML.
    """
    stamps = tuple(
        (entry.name, stamp_of(f"{entry.path}/{record.FILE}")) for entry in os.scandir(folder)
    )
    found, _ = read_list(folder, stamps, frozenset())
    # The state of a killed run changes without a file.
    killed = frozenset(
        name
        for name, status in found.items()
        if status.state == record.RUNNING and not lock.is_held(folder / name)
    )
    _, shown = read_list(folder, stamps, killed)
    ticked = []
    for name in names:
        stamps_of_files = [stamp_of(folder / name / file) for file in FILES]
        ticked.append((name, name in killed, *stamps_of_files))
    comparison, curves = map(json.dumps, render_runs(folder, tuple(ticked)))
    return f'{{"list": {shown}, "comparison": {comparison}, "charts": {curves}}}'


@lru_cache(maxsize=8)
def read_list(
    folder: Path, stamps: Sequence[tuple[str, Stamp]], killed: Container[str]
) -> tuple[dict[str, record.Record], str]:
    """The records of the runs of a folder, and their list as JSON.

    Args:
        folder: of all runs.
        stamps: the name of each folder in it, and what changes with its record.
        killed: the runs that were killed, although their records say that they are running.
    """
    stamp_of_name = dict(stamps)

    def read(run_dir: Path) -> record.Record:
        return read_record(run_dir, stamp_of_name.get(run_dir.name), run_dir.name in killed)

    found = listing.list_runs(folder, read)
    newest = dict(itertools.islice(found.items(), MAX_LISTED))
    return found, json.dumps({**overview.describe_runs(folder, newest), "num": len(found)})


@lru_cache(maxsize=5000)
def read_record(run_dir: Path, stamp: Stamp | None, is_killed: bool) -> record.Record:
    """The record of a run, read again only if one of the other arguments has changed."""
    return record.read(run_dir)


@lru_cache(maxsize=8)
def render_runs(folder: Path, stamps: Sequence[tuple[Any, ...]]) -> tuple[str, str]:
    """The comparison and the curves of runs, as HTML; both may be empty.

    Args:
        folder: of all runs.
        stamps: the name of each run, and what changes with its files.
    """
    runs = find_runs(folder, [name for name, *_ in stamps])
    parts: Any = page.templates().get_template("parts.html").module
    comparison = parts.comparison(compare.compare(runs)) if len(runs) > 1 else ""
    curves = parts.curves(charts.charts_of(runs)) if runs else ""
    return comparison, curves
