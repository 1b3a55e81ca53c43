"""What a step launches on a GPU: counted without one."""

import pytest

from labs.bench import operations
from labs.bench.operations import CONTENDERS, LIMIT, count

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("title", CONTENDERS)
def test_a_step_launches_few_operations_more_than_a_bare_loop(title: str):
    bare, ours = (sum(count(CONTENDERS[title][name]).values()) for name in ("bare", "ours"))
    # The net and the optimizer are most of it, so the steps were counted.
    assert bare > 10
    assert 0 < ours - bare <= LIMIT


def test_the_page_has_both_tables():
    page = operations.PAGE.read_text()
    table = operations.pages.read_table(page, operations.MARKERS)
    for title in CONTENDERS:
        assert f"| {title} | bare | plain Lightning | ours |" in table
    differences = [line for line in table.splitlines() if line.startswith("| more than bare")]
    assert len(differences) == len(CONTENDERS)
    for line in differences:
        assert float(line.split("|")[-2]) <= LIMIT
