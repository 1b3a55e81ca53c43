"""Amounts as Kubernetes and Docker write them."""

import pytest

from samestep.launch.check.quantities import parse_quantity, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("16Gi", 16 * 2**30), (2, 2), ("1e3", 1000), ("2k", 2000), ("3E", 3e18),
     ("16 GB", None), ("lots", None), ("", None), (None, None)],
)  # fmt: skip
def test_quantities(text, value):
    assert parse_quantity(text) == value


def test_sizes_of_docker():
    sizes = [parse_size(value) for value in ("16g", 1024, "1.5m", "2gb", "16Gi")]
    assert sizes == [2**34, 1024, 1.5 * 2**20, 2**31, 2**34]
    assert parse_size("16 GB") is None
