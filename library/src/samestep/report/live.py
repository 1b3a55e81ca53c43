"""Write report.html, one page about a run. The run may still be training.

samestep report runs/mine
samestep report --serve
samestep report --serve /volume/runs --port 8000

--serve shows all runs of a folder in a browser of this machine, while they train, and compares
those that are ticked.
"""

# One page asks one address for the newest state. Only this machine can connect, and every request
# must name it, so that no other page in the browser can read runs through a name of its own.
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.report import charts, compare, listing, page
from samestep.report.files import Run, read_run

HOSTS = {"127.0.0.1", "localhost"}
MAX_LISTED = 500  # the newest runs


def main(argv: Sequence[str]) -> int:
    """Write the page of a run, and print where it is; or serve the pages of all runs."""
    parser = Parser("samestep report", __doc__)
    if "--serve" in argv:
        parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
        parser.add_argument("--port", type=int, default=0, help="default: any free one")
    else:
        parser.add_run_dir()
    parser.add_argument("--serve", action="store_true", help="show a folder of runs, live")
    arguments = parser.parse(argv)
    environment.limit_threads()
    if arguments.serve:
        serve(arguments.folder, arguments.port)
    else:
        print(page.write(arguments.run_dir))
    return 0


def serve(folder: Path, port: int) -> None:
    """Show the runs of a folder until the program is interrupted; port 0 is any free one.

    Raises:
        ConfigError: if there is no such folder, or the port cannot be used.
    """
    listing.list_runs(folder)
    try:
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
        address = urlsplit(self.path)
        place, query = unquote(address.path), parse_qs(address.query)
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if host not in HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "ask for localhost")
        elif place == "/":
            live = page.templates().get_template("live.html")
            self._send("text/html", live.render(title=f"Runs in {self.folder}"))
        elif place == "/data":
            self._send("application/json", json.dumps(answer(self.folder, query.get("run", []))))
        elif place == "/plotly.js":
            self._send("text/javascript", charts.plotly_gz(), ("Content-Encoding", "gzip"))
        elif place.startswith("/report/") and (runs := find(self.folder, [place[8:]])):
            self._send("text/html", page.page_of(runs[0]))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, content: str | bytes, *headers: tuple[str, str]) -> None:
        body = content.encode() if isinstance(content, str) else content
        self.send_response(HTTPStatus.OK)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), *headers):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # the page was closed meanwhile
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the page asks every two seconds."""


def find(folder: Path, names: Sequence[str]) -> list[Run]:
    """The runs of these names in the folder; what is no run there is left out."""
    found = [folder / name for name in dict.fromkeys(names) if Path(name).name == name]
    return [read_run(path) for path in found if (path / "config.yaml").is_file()]


def answer(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The parts of the page: the list, the comparison of the runs of these names, their curves."""
    listed = [listing.describe(*run) for run in listing.list_runs(folder).items()]
    runs = find(folder, names)
    parts: Any = page.templates().get_template("parts.html").module
    tables = compare.compare(runs) if len(runs) > 1 else {}
    return {
        "list": parts.listing(listing.HEADING, listed[:MAX_LISTED], names, len(listed)),
        "comparison": parts.comparison(tables) if tables else "",
        "charts": parts.curves(charts.charts_of(runs)) if runs else "",
    }
