"""Notices that this machine will be taken away: the run saves at once, and goes on.

::

    notice="file:/notices/spot"   a file appears, or its text changes: Kubernetes' downward API, an
                                  agent of the node, Metaflow's spot_termination_notice
    notice="aws"                  the metadata of an EC2 instance, by IMDSv2
    notice="gcp"                  the metadata of a virtual machine of Google
    notice=ask                    a function that returns the text of a notice, or None

A notice is a request to save, as by SIGUSR2: all ranks agree before the next step. SIGTERM, which
follows, then finds little left to save.
"""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError

import lightning as L

from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import environment, output, stopping
from samestep.run_spec import RunSpec

Ask = Callable[[], str | None]

EVERY_S = 2.0  # seconds between two questions; Google takes a machine 30 s after its notice
ANSWERS_S = 2.0  # seconds that a metadata server may take
TOKEN_S = 21_600  # for which a token of AWS is valid
MAX_TEXT = 200  # characters of a notice
FILE = "file:"
# By the variables of their own libraries, another address can be given.
AWS_ADDRESS = ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
GCP_ADDRESS = ("GCE_METADATA_HOST", "metadata.google.internal")


def callback(spec: RunSpec) -> L.Callback | None:
    """``Notices``, if the Trainer was given a source of them.

    Raises:
        ConfigError: if there is no such source.
    """
    ask = source_of(spec.notice)
    return Notices(ask) if ask is not None else None


def source_of(notice: str | Ask | None) -> Ask | None:
    """The function that asks for a notice; None if none is wanted.

    Raises:
        ConfigError: if there is no such source.
    """
    if notice is None or callable(notice):
        return notice
    if notice == "aws":
        return Aws().ask
    if notice == "gcp":
        return ask_gcp
    name, path = notice[: len(FILE)], notice[len(FILE) :]
    if name == FILE and path:
        return partial(read_file, Path(environment.expand_home(path, "notice")).absolute())
    raise ConfigError(
        f"{setting('notice', notice)}: must be {FILE}PATH, aws, gcp, or a function that returns "
        "the text of a notice, or None"
    )


class Notices(L.Callback):
    """Saves the run at each new notice while it trains.

    Args:
        ask: returns the text of a notice, or None.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._ends = threading.Event()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a thread of one rank on each node ask: all ranks of a node are on one machine."""
        self._ends = threading.Event()
        if environment.local_rank() == 0:
            threading.Thread(target=_watch, args=(self.ask, self._ends), daemon=True).start()

    def on_fit_end(self, *args: Any) -> None:
        """Ask no more."""
        self._ends.set()

    def on_exception(self, *args: Any) -> None:
        """Ask no more."""
        self._ends.set()


def _watch(ask: Ask, ends: threading.Event) -> None:
    known: str | None = None
    has_failed = False
    while not ends.is_set():
        try:
            text = ask()
        # Any exception: a source of the user may raise what it likes, and no run may end by it.
        except Exception as error:
            if not has_failed:
                print(f"Note: {option('notice')} has no answer, and is tried again: {error}")
            has_failed = True
        else:
            # What is there already counts too: this process was started on a machine that goes.
            if text is not None and text != known:
                stopping.ask_to_save()
                shown = " ".join(text.split())[:MAX_TEXT] or "it has appeared"
                output.say(f"Notice for node {environment.node_rank()}: {shown}")
            known = text
        ends.wait(EVERY_S)


def read_file(path: Path) -> str | None:
    """The text of a file; None if there is no file."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None


class Aws:
    """Asks the metadata of an EC2 instance, which needs a token that is valid for some hours."""

    def __init__(self) -> None:
        self._token = ""

    def ask(self) -> str | None:
        """What happens to this spot instance, such as ``terminate at 2026-11-27T08:22:00Z``."""
        found = self._get()
        if found is None:
            return None
        action: dict[str, Any] = json.loads(found)
        return f"AWS will {action.get('action')} this instance at {action.get('time')}"

    def _get(self) -> str | None:
        variable, address = AWS_ADDRESS
        server = (environment.variable(variable) or address).rstrip("/")
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = fetch(f"{server}/latest/api/token", ttl, method="PUT")
        headers = {"X-aws-ec2-metadata-token": self._token}
        try:
            return fetch(f"{server}/latest/meta-data/spot/instance-action", headers)
        except HTTPError as error:
            if error.code == 401:
                # The token has expired; the next question gets another one.
                self._token = ""
                return None
            # There is no such entry until the instance will be taken away.
            if error.code == 404:
                return None
            raise


def ask_gcp() -> str | None:
    """Whether Google will take this virtual machine away."""
    variable, host = GCP_ADDRESS
    server = f"http://{environment.variable(variable) or host}"
    url = f"{server}/computeMetadata/v1/instance/preempted"
    if fetch(url, {"Metadata-Flavor": "Google"}).strip() == "TRUE":
        return "Google will preempt this machine"
    return None


def fetch(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """The answer of a metadata server."""
    # Never by a proxy: that would ask for the metadata of its own machine.
    opener = request.build_opener(request.ProxyHandler({}))
    asked = request.Request(url, headers=headers, method=method)
    with opener.open(asked, timeout=ANSWERS_S) as answer:
        text: str = answer.read().decode()
    return text
