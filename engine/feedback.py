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
