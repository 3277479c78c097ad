"""Sequence: a worker's running state of one request. Every length is a property."""

from collections.abc import Sequence as ReadOnly

from .lifecycle import Event, Phase, advance


class Sequence:
    """Tokens so far, how many of them are computed, and the blocks that hold their KV.

    Invariant: `0 <= num_computed_tokens <= num_tokens`, and the blocks have room for all computed tokens. A sequence
    does not know whether it prefills or decodes: it has uncomputed tokens, and a forward pass shrinks their number.
    """

    def __init__(self, request_id: str, namespace: str, token_ids: ReadOnly[int], num_prompt_tokens: int):
        self.request_id = request_id
        self.namespace = namespace
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.block_table: list[int] = []  # logical block index |-> block_id
        self.phase = Phase.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def advance_computed(self, num_tokens: int) -> None:
        self.num_computed_tokens += num_tokens
        assert 0 <= self.num_computed_tokens <= self.num_tokens

    def on(self, event: Event) -> None:
        """Move along the lifecycle table. Raises LocalProtocolError for a step it does not have."""
        self.phase = advance(self.phase, event)
