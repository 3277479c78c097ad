"""A decode worker hands part of a prompt's KV back to the prefill worker that computes the rest of it.

The second turn of a chat: decode holds the first prompt and the answer, prefill at most the prompt. Instead of
computing the answer's KV again, prefill gets it by a hand-over in the other direction, under an id of its own, since
one request then has two hand-overs between the same two workers.
"""

_SUFFIX = "/returned-prefix"


def prefix_return_id(request_id: str) -> str:
    """The id of the hand-over from decode to prefill that belongs to `request_id`."""
    return request_id + _SUFFIX


def request_id_of(return_id: str) -> str | None:
    """The request that a returned prefix belongs to; None for the id of an ordinary hand-over."""
    return return_id.removesuffix(_SUFFIX) if return_id.endswith(_SUFFIX) else None
