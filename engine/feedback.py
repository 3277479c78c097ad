"""Feedback: the newest token of each running sequence, where the sampler leaves it and the next step reads it.

It lives on the device, so the host can launch a step before it knows the tokens that the step computes.
"""

import torch
from torch import Tensor

# More sequences than any worker runs at a time; 32 KB.
NUM_FEEDBACK_SLOTS = 4096


def make_feedback(device: torch.device) -> Tensor:
    """`[NUM_FEEDBACK_SLOTS]` int64; -1 in a slot means that no token could be sampled."""
    return torch.zeros(NUM_FEEDBACK_SLOTS, dtype=torch.int64, device=device)


def resolve_feedback(input_ids: Tensor, feedback_slots: Tensor, feedback: Tensor) -> None:
    """Replace the first ids of `input_ids` `[N]` by the tokens in their slots `[n]`, n <= N; slot -1 leaves one alone.

    A sequence whose sampling failed (-1) computes token 0: its result is dropped when the step is collected, and an id
    outside the vocabulary would stop the device.
    """
    known = input_ids[: len(feedback_slots)]
    sampled = feedback[feedback_slots.clamp(min=0)].clamp(min=0)
    known.copy_(torch.where(feedback_slots >= 0, sampled, known))
