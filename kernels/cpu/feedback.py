"""Tokens of the step before, read where the sampler left them; see `reference.resolve_feedback`."""

import torch
from torch import Tensor


def resolve_feedback(input_ids: Tensor, feedback_slots: Tensor, feedback: Tensor) -> None:
    """Replace the first ids of `input_ids` `[N]` by the tokens in their slots `[n]`, n <= N, in place."""
    known = input_ids[: len(feedback_slots)]
    sampled = feedback[feedback_slots.clamp(min=0)].clamp(min=0)
    known.copy_(torch.where(feedback_slots >= 0, sampled, known))
