"""A causal transformer over characters, in plain torch.

Sources: Vaswani et al., https://arxiv.org/abs/1706.03762; the shape is that of GPT-2 as in
https://github.com/karpathy/nanoGPT: norms before each layer, and one matrix for input and output.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention in which each position sees itself and the positions before it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Float ``[B, T, width]`` to the same shape."""
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, -1))  # [B, T, 3, heads, width / heads]
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, T, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and two linear layers; each is added to what came in."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Float ``[B, T, width]`` to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class Transformer(nn.Module):
    """Predicts the next character at each position, from this and earlier positions only.

    Args:
        vocabulary_size: number of ids, at input and output; both use the same matrix.
        context: most positions of an input.
        width: features of a position.
        num_layers: number of blocks.
        num_heads: heads of each attention; ``width`` is shared out over them.
        dropout: share of features that each training step leaves out, 0 to 1.

    Raises:
        ValueError: if ``width`` cannot be shared out over the heads.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if min(width, num_layers, num_heads) < 1 or width % num_heads:
            raise ValueError(
                f"width={width}, num_layers={num_layers}, num_heads={num_heads}: must be at least "
                "1, and width a multiple of num_heads"
            )
        self.context = context
        self.characters = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # The layers that are added to what came in begin small, as in GPT-2.
                is_added = name.endswith(("out.weight", "down.weight"))
                num_features = width * (2 * num_layers if is_added else 1)
                nn.init.normal_(parameter, std=num_features**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary_size]`` of ids int64 ``[B, T]``, ``T`` at most ``context``."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.characters(ids) + self.positions(places))
        return F.linear(self.norm(self.blocks(x)), self.characters.weight)
