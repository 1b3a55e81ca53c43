"""Reports the progress of a run to Kubeflow Trainer, which shows it in the status of the TrainJob.

Trainer 2.2 and later, if its feature gate ``TrainJobStatus`` is on, sets three variables in the
pods of a TrainJob: the address of its status server, and the names of two files, which hold the
certificate of that server and a token of the pod.
"""

import http.client
import json
import math
import ssl
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning as L

from samestep.callbacks.checkpoints import or_infinite
from samestep.callbacks.notes import print_note
from samestep.callbacks.pace import StepPace
from samestep.ranks import environment
from samestep.ranks.compat import callbacks_of
from samestep.run.history import History

CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
EVERY_S = 10.0  # Trainer's guide asks for at least five seconds between two reports
TIMEOUT_S = 5.0  # of a report
MAX_METRICS, MAX_LENGTH = 256, 64  # Trainer rejects a report with more, or with longer names


class TrainJobProgress(L.Callback):
    """Reports how far the run is, the time that is left, and the newest metrics.

    It reports every ten seconds, and at the end of training and test, from rank zero; outside of a
    TrainJob it does nothing. Threads send the reports, so no step waits for the server. The first
    report that fails leaves a note, and training continues.
    """

    def __init__(self) -> None:
        self._reports = False
        self._num_steps = math.inf
        self._pace = StepPace()
        self._due = 0.0
        self._sender: threading.Thread | None = None
        self._has_failed = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock at the step from which the run resumes."""
        is_in_trainjob = environment.variable(environment.TRAINJOB_SERVER) is not None
        self._reports = is_in_trainjob and trainer.is_global_zero
        self._num_steps = or_infinite(trainer.estimated_stepping_batches)
        self._pace.start(trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Report now and then."""
        now = time.monotonic()
        if not self._reports or now < self._due:
            return
        self._due = now + EVERY_S
        # A server that is slow gets fewer reports.
        if self._sender is None or not self._sender.is_alive():
            self._send(trainer, self._describe(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report that training is complete, perhaps before its last step."""
        self._num_steps = trainer.global_step
        self._send_last(trainer)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the metrics of the test, if this process has trained."""
        if self._num_steps == trainer.global_step:
            self._send_last(trainer)

    def _describe(self, trainer: L.Trainer) -> dict[str, Any]:
        """What Trainer's status server takes."""
        step = trainer.global_step
        values: dict[str, float] = {"epoch": trainer.current_epoch, "step": step}
        for history in callbacks_of(trainer, History):
            values |= history.last()
        metrics = []
        for name, value in values.items():
            if len(name) <= MAX_LENGTH:
                metrics.append({"name": name, "value": f"{value:.6g}"})
        status: dict[str, Any] = {
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
            "metrics": metrics[:MAX_METRICS],
        }
        if math.isfinite(self._num_steps):
            # With several optimizers a step counts several times.
            done = min(1.0, step / max(1, self._num_steps))
            status["progressPercentage"] = int(100 * done)
        seconds = self._pace.seconds_left(step, self._num_steps)
        if seconds is not None:
            status["estimatedRemainingSeconds"] = math.ceil(seconds)
        return {"trainerStatus": status}

    def _send(self, trainer: L.Trainer, report: dict[str, Any]) -> None:
        """Send a report in a thread, which does not keep the process alive."""
        arguments = trainer, report
        self._sender = threading.Thread(target=self._post, args=arguments, daemon=True)
        self._sender.start()

    def _send_last(self, trainer: L.Trainer) -> None:
        """Send a report that no other one follows, and wait for it: the process may end next."""
        if not self._reports:
            return
        # The server must not get the report before this one afterwards.
        self._wait()
        self._send(trainer, self._describe(trainer))
        self._wait()

    def _wait(self) -> None:
        """Wait for the report that is being sent, but not for a server that has failed before."""
        if self._sender is not None and not self._has_failed:
            self._sender.join(TIMEOUT_S)

    def _post(self, trainer: L.Trainer, report: dict[str, Any]) -> None:
        """Send a report now; the first one that fails leaves a note."""
        try:
            post(report)
        except OSError as error:
            why = str(error)
        except (ValueError, http.client.HTTPException) as error:
            # Not its text, which may be a header with the token.
            why = type(error).__name__
        else:
            return
        if not self._has_failed:
            print_note(trainer, f"Note: the TrainJob does not show the progress of the run: {why}")
        self._has_failed = True


def post(report: dict[str, Any]) -> None:
    """Send a report to Trainer's status server.

    Raises:
        OSError: if there is no answer, or the server rejects the report.
    """
    address = urlsplit(environment.variable(environment.TRAINJOB_SERVER) or "")
    # Each time, as kubelet replaces the token once an hour.
    token = Path(environment.variable(TOKEN) or "").read_text().strip()
    context = ssl.create_default_context(cafile=environment.variable(CERTIFICATE))
    # Not urllib, which would ask a proxy, and follow the server elsewhere with the token.
    connection = http.client.HTTPSConnection(
        address.hostname or "", address.port, timeout=TIMEOUT_S, context=context
    )
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", address.path, json.dumps(report), headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise OSError(f"its status server answers {answer.status} {answer.reason}")
    finally:
        connection.close()
