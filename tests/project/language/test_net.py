"""The transformer: what it may see, and what it shares."""

import pytest
import torch

from project.language.net import Transformer


@pytest.fixture
def net() -> Transformer:
    torch.manual_seed(0)
    return Transformer(11, context=8, width=12, num_layers=2, num_heads=3, dropout=0.0).eval()


def test_a_later_character_never_changes_an_earlier_logit(net: Transformer):
    ids = torch.randint(11, (4, 8))
    for place in range(8):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        before, after = net(ids), net(changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.allclose(before[:, place:], after[:, place:])
        # An earlier character counts in each later logit.
        assert ((before - after).abs().amax(2)[:, place:] > 0).all()
