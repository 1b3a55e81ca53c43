"""``samestep report --serve``: the runs of a folder in a browser, while they train.

One page asks one address for the newest state. Only this machine can connect, and every request
must name it, so that no other page in the browser can read runs through a name of its own.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from samestep.errors import ConfigError
from samestep.report import charts, listing, page
from samestep.report.compare import compare
from samestep.report.files import Run, read_run

HOSTS = {"127.0.0.1", "localhost"}
MAX_LISTED = 500  # the newest runs


def serve(folder: Path, port: int) -> None:
    """Show the runs of a folder until the program is interrupted; port 0 is any free one.

    Raises:
        ConfigError: if the port cannot be used.
    """
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
    listed, runs = listing.list_runs(folder), find(folder, names)
    parts: Any = page.templates().get_template("parts.html").module
    return {
        "list": parts.listing(listing.HEADING, listed[:MAX_LISTED], names, len(listed)),
        "comparison": parts.comparison(compare(runs)) if len(runs) > 1 else "",
        "charts": parts.curves(charts.charts_of(runs)) if runs else "",
    }
