"""What a user asked: Request and SamplingParams, both frozen, and why a generation ended."""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a generation ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"  # an end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client left or cancelled


DEFAULT_PRIORITY = 2  # the middle


class Urgency(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who is served before whom, the same in the gateway and in both kinds of worker (core/queueing.py).

    `priority` 0 is the highest, twice DEFAULT_PRIORITY the lowest. `key` names who shares fairly: a digest of the
    client's API key. `is_batch`: it takes what interactive requests leave.
    """

    priority: int = DEFAULT_PRIORITY
    key: str = ""
    is_batch: bool = False


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose the next token. Ranges are checked in the gateway, before anything reaches a worker.

    `temperature` 0 is greedy. `top_k` 0 is off, `top_p` 1 is off (0 is greedy), `min_p` 0 is off. `seed` is an
    unsigned 64-bit number; a request without one gets one from the gateway, so every stream can be resumed exactly.

    Logits are processed in this order: `repetition_penalty` (> 0; 1 is off; tokens of prompt and output),
    `frequency_penalty` and `presence_penalty` (0 is off; tokens of the output), `logit_bias` (token id, added), then
    what must not come: end tokens before `min_tokens`, and what `grammar` forbids. `grammar` is llguidance's
    serialised form (vocab/grammar.py makes and checks it), "" none.

    `num_logprobs`: None, or how many of the likeliest tokens are told with each chosen one (0: it alone). They are
    log-probabilities of the model itself, before all of the above.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    num_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether the values of all tokens before it decide how a token is chosen, not only their number."""
        return bool(self.grammar) or self.has_penalties

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0 or self.top_k == 1


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one token: its own, and the likeliest ones at its place, best first (lowest id among equals). All finite."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Request(msgspec.Struct, frozen=True):
    """One prompt to continue, once for each of `choices` (their numbers, part of what each draw depends on).

    `output_token_ids` is not empty when a broken stream is resumed on another worker; then there is one choice.
    `num_prompt_logprobs`: as `sampling.num_logprobs`, for every prompt token but the first; the whole prompt is then
    computed on the decode worker, and `sampling.max_tokens` may be 0.

    `namespace` separates caches that must not share (model, adapter, tenant). `stop_token_ids` in `sampling` already
    holds the model's end-of-sequence tokens unless `ignore_eos`.
    """

    request_id: str
    namespace: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    urgency: Urgency = Urgency()
    choices: tuple[int, ...] = (0,)
    num_prompt_logprobs: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
