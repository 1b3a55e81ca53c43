"""The transformer: what it sees, and what it shares."""

import pytest
import torch

from examples.language.net import Transformer


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


def test_input_and_output_share_one_matrix(net: Transformer):
    shapes = [tuple(p.shape) for p in net.parameters() if 11 in p.shape]
    assert shapes == [(11, 12)]
    assert sum("characters" in name for name in net.state_dict()) == 1
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():
        before = net(ids)
        net.characters.weight[5] *= 2  # a character that the input does not have
        assert torch.allclose(net(ids)[..., 5], 2 * before[..., 5], atol=1e-6)
        assert torch.equal(net(ids)[..., :5], before[..., :5])


def test_shorter_inputs_give_the_same_logits(net: Transformer):
    ids = torch.randint(11, (2, 8))
    assert torch.allclose(net(ids[:, :3]), net(ids)[:, :3], atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 2, 5), (12, 0, 3), (0, 2, 1), (12, 2, 0)])
def test_an_impossible_shape_is_rejected(shape: tuple[int, int, int]):
    with pytest.raises(ValueError, match="must be at least 1, and width a multiple of num_heads"):
        Transformer(11, 8, *shape, 0.0)
