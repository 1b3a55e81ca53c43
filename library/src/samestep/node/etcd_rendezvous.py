"""Where nodes that come and go meet: torch's rendezvous by etcd, for an etcd that may be lost.

With torch's own handler an etcd that does not answer ends every node. Each of them then writes
"closed" into the etcd that comes back, so that the nodes that replace them end as well.
"""

import logging
import secrets
import time

from etcd import EtcdException
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)
from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from samestep.ranks import network


def is_loss(error: Exception) -> bool:
    """Whether an error means that etcd does not answer, or has lost what the nodes wrote."""
    # torch raises a plain LookupError for a key that never comes. Subclasses of it, such as
    # KeyError, are errors in the code.
    if type(error) is LookupError:
        return True
    return isinstance(error, (RendezvousConnectionError, EtcdException))


class Backend(RendezvousBackend):
    """What etcd knows of the nodes; nothing once this node has left to meet them again."""

    # A failed request is part of a cycle (a traceback that urllib3 keeps), which may keep torch's
    # handler, and its heartbeats, after it was dropped. They would hold a place in the group for a
    # node that no longer has it, and the others would wait.

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend
        self.has_left = False

    @property
    def name(self) -> str:
        """What torch calls this kind of rendezvous."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """What the nodes wrote."""
        return None if self.has_left else self._backend.get_state()

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write the state, if no other node has written one since ``token``."""
        return None if self.has_left else self._backend.set_state(state, token)


class EtcdRendezvous(RendezvousHandler):
    """Meets the other nodes by etcd, and again whenever etcd was lost.

    - Ranks that train need no etcd, so they train on while it does not answer.
    - When etcd answers again, the nodes meet again. It may have lost its data, or it may have
      removed this node from the run because it got no heartbeats. So all ranks save and restart.
    - Where heartbeats come so late that other nodes meet without this one, it meets them again.
      torch would leave two groups, each of which trains the run.
    - Nodes that must meet wait for etcd, as long as they wait for each other.
    - The rendezvous is never closed: etcd outlives the nodes, and a node that comes later, to
      replace one or to resume the run, would find it closed. Nodes that have gone send no
      heartbeats.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        # They print each failed request.
        for library in ("etcd", "urllib3"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
        self._parameters = parameters
        self._address = parse_rendezvous_endpoint(parameters.endpoint, default_port=2379)
        self._timeout_s = int(parameters.config["join_timeout"])
        self._mark = secrets.token_hex(8)
        # None before the nodes meet, and while etcd is lost.
        self._handler: RendezvousHandler | None = None
        self._backend: Backend | None = None
        self._store: Store | None = None  # outlives each meeting
        self._place = ""
        self._is_lost = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._meet()
            except Exception as error:
                reason = self._disconnect(error)
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"no etcd for {self._timeout_s} s: {reason}")
            time.sleep(1)

    def num_nodes_waiting(self) -> int:
        """How many nodes want to take part; 1 if this node must meet the others again."""
        if self._handler is None or self._store is None:
            # The agent restarts the ranks if this is not 0. They save then, and this node calls
            # next_rendezvous: not before etcd answers, or they would wait for it.
            return int(network.answers(*self._address))
        try:
            if not self._store.check([self._place]):
                raise LookupError("its data are lost")
            if self._store.get(self._place) != self._mark.encode():
                raise LookupError("another node has the place of this one")
            return self._handler.num_nodes_waiting()
        except Exception as error:
            self._disconnect(error)
        return 0

    def _meet(self) -> RendezvousInfo:
        """Connect to etcd if there is no connection, and meet the other nodes once."""
        if self._handler is None:
            backend, self._store = create_backend(self._parameters)
            self._backend = Backend(backend)
            self._handler = create_handler(self._store, self._backend, self._parameters)
        assert self._store is not None
        info = self._handler.next_rendezvous()
        # An etcd without this key has lost its data, and the nodes of a later group overwrite it.
        self._place = f"{self._parameters.run_id}/place/{info.rank}"
        self._store.set(self._place, self._mark)
        if self._is_lost:
            print("entrypoint: etcd is back; the nodes have met again", flush=True)
        self._is_lost = False
        return info

    def _disconnect(self, error: Exception) -> str:
        """Drop the connection, and return why it was lost."""
        if not is_loss(error):
            raise error
        reason = str(error.__cause__ or error)
        # Once for each loss: this is called every second until etcd is back.
        if not self._is_lost:
            lost = f"etcd is lost ({reason}); the nodes meet again when it is back"
            print(f"entrypoint: {lost}", flush=True)
        self._is_lost = True
        # A client of etcd does not always recover from a failure, so the next one is new.
        if self._backend is not None:
            self._backend.has_left = True
        self._handler = self._store = None
        return reason

    def get_backend(self) -> str:
        """What torch calls this kind of rendezvous."""
        return self._parameters.backend

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._parameters.run_id

    def is_closed(self) -> bool:
        """Never: see the class."""
        return False

    def set_closed(self) -> None:
        """Leave it open: see the class."""

    def shutdown(self) -> bool:
        """Leave it open: see the class."""
        return True
