"""Why a request cannot be taken by a decode worker. Pure."""

from typing import NamedTuple

from ..core.request import Request


class Refusal(NamedTuple):
    """`retryable`: another worker, or this one later, may take it."""

    message: str
    retryable: bool


def misfit(request: Request, context_length: int) -> Refusal | None:
    """What is wrong with the request itself, for a worker whose requests may have `context_length` tokens."""
    choices = request.choices
    if len(set(choices)) != max(len(choices), 1):
        return Refusal("choices must differ", False)
    if len(choices) > 1 and (request.output_token_ids or not request.sampling.max_tokens):
        return Refusal("several choices must begin together, and have tokens", False)
    if not request.sampling.max_tokens and request.num_prompt_logprobs is None:
        return Refusal("neither tokens nor log-probabilities of the prompt are asked for", False)
    room = request.num_prompt_tokens + request.sampling.max_tokens
    if room > context_length:
        return Refusal(f"{room} tokens are asked for, this worker holds {context_length}", False)
    return None
