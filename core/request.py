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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0 or self.top_k == 1


class Request(msgspec.Struct, frozen=True):
    """One prompt to continue. `output_token_ids` is not empty when a broken stream is resumed on another worker.

    `namespace` separates caches that must not share (model, adapter, tenant). `stop_token_ids` in `sampling` already
    holds the model's end-of-sequence tokens unless `ignore_eos`.
    """

    request_id: str
    namespace: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    urgency: Urgency = Urgency()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)
