"""Amounts of memory and processors, as Kubernetes and Docker write them."""

import re

QUANTITY = r"^[+-]?(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
DOCKER_SIZE = r"([\d.]+)([kmg])b?"

DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
UNITS = {unit: 10.0**exponent for unit, exponent in DECIMAL.items()}
UNITS |= {unit: 2.0**exponent for unit, exponent in BINARY.items()}


def parse_quantity(value: object) -> float | None:
    """The number that a quantity of Kubernetes such as 500m or 16Gi means; None if it is none."""
    text = str(value)
    if not re.fullmatch(QUANTITY, text):
        return None
    unit = re.sub(r".*\d\.?", "", text)  # what follows the last digit
    return float(text.removesuffix(unit)) * UNITS[unit]


def parse_size(value: object) -> float | None:
    """The bytes that 16Gi (Kubernetes) or 16g (Docker) means; None if it is no size."""
    if match := re.fullmatch(DOCKER_SIZE, str(value)):
        power = "kmg".index(match[2]) + 1
        return float(match[1]) * 1024.0**power
    return parse_quantity(value)
