"""Losses of sequences, whose lengths differ."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import samestep

from .base import DRAWN, MEAN, NUM_SAMPLES, Shape, TaskOf, normal, table

NUM_TOKENS = 6
PAD = -100


def texts() -> list[Tensor]:
    """Tokens ``[2 to 9]``."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(NUM_SAMPLES):
        length = int(torch.randint(2, 10, (1,), generator=generator))
        found.append(torch.randint(NUM_TOKENS, (length,), generator=generator))
    return found


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    """As long as the longest of these samples, so each rank may have another length."""
    labels = pad_sequence(samples, batch_first=True, padding_value=PAD)
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def blocks() -> TensorDataset:
    """Packed: texts one after the other, cut into blocks of 8 tokens."""
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randint(NUM_TOKENS, (NUM_SAMPLES, 8), generator=generator))


class LanguageModel(nn.Module):
    """Logits of the next token, by this one and the mean of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(NUM_TOKENS, 5), nn.Linear(5, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.embed(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.out(vectors + vectors.cumsum(1) / counts)


def tokens_mean(net: Any, batch: Any) -> Tensor:
    logits, labels = net(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def losses_of_tokens(net: Any, batch: Any) -> tuple[Tensor, Tensor]:
    logits, labels = net(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), labels != PAD


def tokens_samestep(net: Any, batch: Any) -> Tensor:
    return samestep.mean(*losses_of_tokens(net, batch))


def texts_mean(net: Any, batch: Any) -> Tensor:
    """The mean over the tokens of a text, and then over the texts."""
    losses, mask = losses_of_tokens(net, batch)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def packed(net: Any, batch: Any) -> Tensor:
    (tokens,) = batch
    logits = net(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def masked_of(net: Any, tokens: Tensor, is_masked: Tensor) -> tuple[Tensor, Tensor]:
    logits = net(torch.where(is_masked, 0, tokens))
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none"), is_masked


def masked(net: Any, batch: Any) -> Tensor:
    """BERT: some tokens are hidden, in each step others."""
    (tokens,) = batch
    losses, is_masked = masked_of(net, tokens, torch.rand(tokens.shape) < 0.3)
    return losses[is_masked].mean()


def blocks_and_masks() -> TensorDataset:
    hidden = normal(NUM_SAMPLES, 8, seed=5) < -0.5
    return TensorDataset(*blocks().tensors, hidden)


def masked_samestep(net: Any, batch: Any) -> Tensor:
    return samestep.mean(*masked_of(net, *batch))


def preferences(net: Any, batch: Any) -> Tensor:
    """DPO: the chosen answer must be likelier than the rejected one."""
    x, _ = batch
    chosen, rejected = net(x)[:, 0], net(-x)[:, 0]
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean()


def speech() -> TensorDataset:
    """Frames ``[10, 4]``, letters ``[4]``, and how many of both there are."""
    generator = torch.Generator().manual_seed(6)
    letters = torch.randint(1, NUM_TOKENS, (NUM_SAMPLES, 4), generator=generator)
    frames = torch.randint(8, 11, (NUM_SAMPLES,), generator=generator)
    lengths = torch.randint(1, 5, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(normal(NUM_SAMPLES, 10, 4), letters, frames, lengths)


def acoustic() -> nn.Module:
    return nn.Linear(4, NUM_TOKENS)


def ctc(net: Any, batch: Any) -> Tensor:
    sound, letters, frames, lengths = batch
    logs = net(sound).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(logs, letters, frames, lengths)


def ctc_of_samples(net: Any, batch: Any) -> Tensor:
    sound, letters, frames, lengths = batch
    logs = net(sound).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(logs, letters, frames, lengths, reduction="none")


def ctc_none(net: Any, batch: Any) -> Tensor:
    return ctc_of_samples(net, batch).mean()


def ctc_by_letters(net: Any, batch: Any) -> Tensor:
    """The sum, divided by the number of letters of the batch."""
    lengths = batch[3]
    return ctc_of_samples(net, batch).sum() / lengths.sum()


def ctc_by_letters_mean(net: Any, batch: Any) -> Tensor:
    lengths = batch[3]
    return samestep.mean(ctc_of_samples(net, batch) / lengths, lengths)


def next_number(net: Any, batch: Any) -> Tensor:
    x, _ = batch
    outputs, _ = net(x[:, :, None])
    return F.mse_loss(outputs[:, :-1, 0], x[:, 1:])


SHAPES = (
    Shape(
        "language model, padded: mean over tokens", texts, TaskOf(LanguageModel, tokens_mean),
        MEAN, TaskOf(LanguageModel, tokens_samestep), collate=pad,
    ),
    Shape(
        "language model, padded: mean over texts", texts, TaskOf(LanguageModel, texts_mean),
        collate=pad,
    ),
    Shape("language model, packed", blocks, TaskOf(LanguageModel, packed)),
    Shape(
        "masked language model", blocks, TaskOf(LanguageModel, masked),
        f"{DRAWN}, {MEAN}", TaskOf(LanguageModel, masked_samestep), blocks_and_masks, draws=True,
    ),
    Shape("DPO", table, TaskOf(lambda: nn.Linear(4, 1), preferences)),
    Shape("CTC, `mean`", speech, TaskOf(acoustic, ctc)),
    Shape("CTC, `none`, then the mean", speech, TaskOf(acoustic, ctc_none)),
    Shape(
        "CTC / letters of the batch", speech, TaskOf(acoustic, ctc_by_letters),
        MEAN, TaskOf(acoustic, ctc_by_letters_mean),
    ),
    Shape(
        "LSTM", table,
        TaskOf(lambda: nn.LSTM(1, 1, batch_first=True), next_number),
    ),
)  # fmt: skip
