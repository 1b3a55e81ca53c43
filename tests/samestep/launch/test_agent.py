from types import SimpleNamespace
from typing import Any

import pytest

from samestep.launch import agent


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([(1, 0, "error: a", 1), (-9, 0, "", 0)], 1),  # killed
        ([(1, 0, "RuntimeError: peer", 0), (2, 1, "error: why", 5)], 1),  # says why
        ([(1, 0, "RuntimeError: peer", 2), (1, 0, "ValueError: x", 1)], 1),  # spoke first
        ([(143, 0, "", 0), (1, 0, "ValueError: x", 1)], 1),  # ended by the agent
        ([(1, 0, "ValueError: x", 9), (-9, 30, "", 0)], 0),  # hung until the agent killed it
        ([(143, 0, "", 1), (143, 0, "", 0)], 1),
    ],
)
def test_the_rank_that_failed_first(ranks: list[tuple[int, int, str, float]], first: int):
    failures: Any = {
        rank: SimpleNamespace(exitcode=code, timestamp=100 + at)
        for rank, (code, at, _, _) in enumerate(ranks)
    }
    said: Any = {
        rank: SimpleNamespace(error=error, at=at) for rank, (_, _, error, at) in enumerate(ranks)
    }
    assert agent._first(failures, said) == first


def test_the_last_error_of_a_log():
    assert agent.last_error("a\nerror: b\n  c\n") == "error: b\n  c"
    assert agent.last_error("[rank1]: ValueError: b\nW1121 noise") == "[rank1]: ValueError: b"
    assert agent.last_error("Fatal Python error: Segmentation fault\n\n") == (
        "Fatal Python error: Segmentation fault"
    )
    assert agent.last_error("") == ""
