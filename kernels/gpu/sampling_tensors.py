"""What the sampling kernels share: how each row is to be sampled, how a vocabulary is cut, and small jit helpers."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import require, require_tensor

PIECE = 4096  # tokens that one program reads at once
GROUP = 64  # neighbouring tokens whose highest logit is kept, so that later passes skip those who cannot matter
NO_TOKEN = tl.constexpr(2147483647)  # above every id
# Below this temperature float32 logits that differ at all are too far apart for the noise to matter.
_GREEDY_TEMPERATURE = tl.constexpr(1e-7)
_FLOATS = (torch.float64, torch.float32)
_INTS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How to sample each of S rows: contiguous `[S]` tensors on the logits' device.

    A row is greedy if its temperature is below 1e-7, its top_p is 0 or its top_k is 1. Floats are float64 where the
    tokens must be those of the CPU sampler (float32 rounds 0.7). Integers are int32 or int64; seed words are taken
    modulo 2**32. The last two are what the host knows of all rows, to spare launches: True is always right.
    """

    temperature: Tensor
    top_k: Tensor  # 0 or less, or the vocabulary and more: off
    top_p: Tensor  # 1 or more: off
    min_p: Tensor  # 0 or less: off
    seed_low: Tensor
    seed_high: Tensor
    choice: Tensor
    position: Tensor  # index of the sampled token in prompt + output
    any_drawn: bool = True  # some row is not greedy
    any_filtered: bool = True  # some row that is not greedy has top-k or top-p

    def check(self, num_rows: int) -> None:
        """Raises ValueError for a tensor of another length or dtype."""
        for name in ("temperature", "top_p", "min_p"):
            require_tensor(name, getattr(self, name), (num_rows,), *_FLOATS)
        for name in ("top_k", "seed_low", "seed_high", "choice", "position"):
            require_tensor(name, getattr(self, name), (num_rows,), *_INTS)
        for name in self.__slots__[:8]:
            require(getattr(self, name).is_contiguous(), f"{name} is not contiguous")


@dataclass(frozen=True, slots=True)
class VocabularyCut:
    """How a row of `vocab_size` logits is cut. It depends on nothing else, or a row's sums would."""

    vocab_size: int

    @property
    def num_pieces(self) -> int:
        return int(triton.cdiv(self.vocab_size, PIECE))

    @property
    def num_groups(self) -> int:
        """Groups of all pieces, those beyond the vocabulary too."""
        return self.num_pieces * (PIECE // GROUP)

    @property
    def padded_pieces(self) -> int:
        return int(triton.next_power_of_2(self.num_pieces))

    @property
    def padded_groups(self) -> int:
        return int(triton.next_power_of_2(self.num_groups))


@triton.jit
def is_greedy(temperature, top_k, top_p):  # type: ignore[no-untyped-def]
    return (temperature < _GREEDY_TEMPERATURE) | (top_p <= 0.0) | (top_k == 1)


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    """Of an fp32 that is no NaN (the first pass turned those into +inf)."""
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def row_best(piece_best_ptr, row, num_pieces, PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest logit of a row, from those of its pieces `[S, num_pieces]`."""
    piece = tl.arange(0, PIECES)
    best = tl.load(piece_best_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    return tl.max(best, 0)
