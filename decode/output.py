"""When a generation ends, and what its next token may not be. Pure."""

from ..core.request import FinishReason, SamplingParams


def finish_reason(token_id: int, num_output_tokens: int, sampling: SamplingParams) -> FinishReason | None:
    """Why the generation ends with this token, or None. A stop token ends it even as the last one allowed."""
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def suppressed_tokens(num_output_tokens: int, sampling: SamplingParams) -> tuple[int, ...]:
    """Tokens that may not come next: the stop tokens while `min_tokens` is not reached."""
    return sampling.stop_token_ids if num_output_tokens < sampling.min_tokens else ()
