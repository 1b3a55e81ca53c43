"""What is concluded from how the ranks ended. Real ranks: test_entrypoint.py."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from samestep.node import outcome
from samestep.node.outcome import Outcome
from samestep.ranks.failure import BY_AGENT, LOST


def failed(ranks: list[tuple[int, int, str, int]]) -> Any:
    """Ranks that failed: exit code, second, message in its error file, nanosecond of that."""
    return {
        rank: SimpleNamespace(
            exitcode=code,
            timestamp=100 + second,
            error_file_data={
                "message": {"message": message, "extraInfo": {"time_ns": nanosecond}}
                if message
                else "<NONE>"  # torch's word where there is no file
            },
        )
        for rank, (code, second, message, nanosecond) in enumerate(ranks)
    }


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([(1, 0, "error: a", 1), (-9, 0, "", 0)], 1),  # killed
        ([(1, 0, "RuntimeError: peer", 0), (2, 1, "error: why", 5)], 1),  # says why
        ([(1, 0, "RuntimeError: peer", 2), (1, 0, "ValueError: x", 1)], 1),  # reported first
        ([(143, 0, "", 0), (1, 0, "ValueError: x", 1)], 1),  # ended by the agent
        ([(1, 0, "ValueError: x", 9), (-9, 30, "", 0)], 0),  # hung until the agent killed it
        ([(143, 0, "error: b", 1), (143, 0, "error: a", 0)], 1),
        ([(1, 0, f"rank 0 {LOST}", 0), (1, 0, "ValueError: x", 1)], 1),
        ([(1, 0, f"rank 0 {LOST}", 0), (1, 0, "", 1)], 1),  # ended without a message
    ],
)
def test_the_rank_that_failed_first(ranks: list[tuple[int, int, str, int]], first: int):
    assert outcome.first_rank(failed(ranks)) == first


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(143, 0, "", 0), (-15, 0, "", 0)], Outcome(143)),
        ([(-9, 0, "", 0)], Outcome(137, "rank 0 was ended by SIGKILL (out of memory?)")),
        ([(-9, 0, "error: no progress", 0)], Outcome(1, "rank 0: error: no progress", True)),
        ([(-11, 0, "", 0)], Outcome(139, "rank 0 was ended by SIGSEGV")),
        ([(2, 0, "error: seed=x", 0)], Outcome(2, "rank 0: error: seed=x", True)),
        ([(1, 0, "ValueError: x", 0)], Outcome(1, "rank 0: ValueError: x", True)),
        ([(1, 0, "ValueError: x", 0), (1, 5, "error: y", 0)], Outcome(1, "rank 1: error: y", True)),
        ([(3, 0, "", 0)], Outcome(3, "rank 0 ended with exit code 3 and without a message")),
    ],
)
def test_one_exit_code_and_one_cause(ranks: list[tuple[int, int, str, int]], expected: Outcome):
    assert outcome.outcome_of(failed(ranks)) == expected


def test_an_error_that_ranks_leave_to_the_agent_is_printed_by_it():
    """Whether the others have left it too, or were ended before."""
    for other in (143, 0, "", 0), (2, 0, "error: seed=x", 1):
        failures = failed([other, (2, 0, "error: seed=x", 0)])
        failures[1].error_file_data["message"]["extraInfo"]["printing_rank"] = BY_AGENT
        assert outcome.outcome_of(failures) == Outcome(2, "error: seed=x")


@pytest.mark.parametrize(
    ("code", "max_nodes", "final"),
    [(2, 2, True), (2, 3, True), (143, 2, True), (143, 3, False), (1, 2, False), (-9, 2, False)],
)
def test_what_is_not_started_again(code: int, max_nodes: int, final: bool):
    config: Any = SimpleNamespace(min_nodes=2, max_nodes=max_nodes)
    assert outcome.is_final(failed([(code, 0, "", 0)]), config) == final


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RendezvousClosedError(), "another node has finished the run, or has failed for good"),
        (RendezvousTimeoutError(), "2 or more nodes have not met within 9 s"),
        (RendezvousTimeoutError("no etcd for 9 s: refused"), "no etcd for 9 s: refused"),
        (RendezvousStateError(), "RendezvousStateError"),
        (DistStoreError("one\ntwo"), "one"),
    ],
)
def test_every_error_of_a_meeting_has_a_reason(error: Exception, reason: str):
    config: Any = SimpleNamespace(min_nodes=2, rdzv_configs={"timeout": "9", "join_timeout": "9"})
    assert outcome.reason_of(error, config) == reason
