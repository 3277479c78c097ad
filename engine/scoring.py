"""Log-probabilities of tokens that are given: a prompt's own. The head runs on every position, a few at a time."""

from collections.abc import Sequence

from torch import Tensor

from .launched import LaunchedLogprobs
from .model_runner import ModelRunner
from .sampler import Sampler

_SLICE_BYTES = 64 << 20  # of logits that exist at a time


def rows_per_slice(vocab_size: int) -> int:
    return max(1, _SLICE_BYTES // (4 * vocab_size))


def launch_scores(
    runner: ModelRunner, sampler: Sampler, hidden: Tensor, token_ids: Sequence[int], num_top: int, vocab_size: int
) -> list[LaunchedLogprobs]:
    """Start scoring `token_ids` `[n]`, each after the context that `hidden` `[n, hidden_size]` ends; read in order."""
    step = rows_per_slice(vocab_size)
    return [
        sampler.score(runner.logits(hidden[start : start + step]), token_ids[start : start + step], num_top)
        for start in range(0, len(token_ids), step)
    ]
