"""What the check needs no run for; library/tests/test_losses.py has its notes."""

import pytest

from samestep.errors import ConfigError
from samestep.plugins.loss_check import LossCheck


def test_unknown_names_are_rejected():
    with pytest.raises(ConfigError, match="allow: los is not known; choose from loss, random"):
        LossCheck(["los"])
