"""PromptScores: log-probabilities of a prompt's own tokens, told once, with the first word to the client. Pure."""

from collections.abc import Sequence

from ..core.request import TokenLogprobs


class PromptScores:
    """Scores of all tokens but the first, in order, as the prompt is computed here chunk by chunk.

    token_ids   t0 t1 t2 t3 t4      the state of t0 scores t1, that of t3 the last one, t4
                |--chunk-|          scores t1 t2 t3
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_top: int):
        self._token_ids = prompt_token_ids
        self._scores: list[TokenLogprobs] = []
        self.num_top = num_top

    @property
    def is_complete(self) -> bool:
        return len(self._scores) == len(self._token_ids) - 1

    @property
    def max_cached_tokens(self) -> int | None:
        """As `Sequence.max_cached_tokens`: the states that are still needed have to be computed."""
        return None if self.is_complete else len(self._scores)

    def targets(self, start: int, stop: int) -> Sequence[int]:
        """The tokens that the states of the tokens `[start, stop)` score; none behind the prompt."""
        return self._token_ids[start + 1 : stop + 1]

    def add(self, start: int, scores: Sequence[TokenLogprobs]) -> None:
        """Of `targets(start, ...)`. What has been computed a second time is known already."""
        self._scores += scores[len(self._scores) - start :]

    def read(self) -> list[TokenLogprobs]:
        """All of them. Raises AssertionError when the prompt is not complete."""
        assert self.is_complete
        return self._scores
