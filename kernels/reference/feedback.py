"""Definition of the op that reads tokens which only the device knows."""

from torch import Tensor


def resolve_feedback(input_ids: Tensor, feedback_slots: Tensor, feedback: Tensor) -> None:
    """Replace the first ids of `input_ids` `[N]` by the tokens in their slots of `feedback`, in place.

    `feedback_slots` is `[n]`, n <= N; slot -1 leaves an id alone. A token -1 (none could be sampled) becomes 0: what is
    computed from it is dropped later, but an id outside the vocabulary would stop a device.
    """
    for row, slot in enumerate(feedback_slots.tolist()):
        if slot >= 0:
            input_ids[row] = max(int(feedback[slot]), 0)
