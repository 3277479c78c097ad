"""SamplingParams and TextRules of a request; whatever passes cannot raise in a worker."""

import secrets

from ...core.errors import RequestError
from ...core.request import SamplingParams
from .fields import CommonFields
from .json_errors import field_of
from .request import TextRules

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of one
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024


def sampling_params(fields: CommonFields, num_logprobs: int | None, vocab_size: int) -> SamplingParams:
    """`max_tokens` is left open. `vocab_size`: width of the logits."""
    stop_token_ids = fields.stop_token_ids or []
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries", "stop_token_ids")
    check_vocabulary(stop_token_ids, "stop_token_ids", vocab_size)
    top_k = fields.top_k or 0
    penalty = fields.repetition_penalty
    return SamplingParams(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=0 if top_k < 0 else min(top_k, vocab_size),
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        seed=_seed(fields.seed),
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        logit_bias=_biases(fields.logit_bias or {}, vocab_size),
        num_logprobs=num_logprobs,
    )


def text_rules(fields: CommonFields) -> TextRules:
    return TextRules(
        stop=_stop_strings(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def check_vocabulary(token_ids: list[int], param: str, vocab_size: int) -> None:
    """Raises RequestError for the first id that is `vocab_size` or more."""
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise RequestError(
            f"{param}[{index}] is not a token of this model, whose ids are 0 to {vocab_size - 1}", field_of(param)
        )


def _biases(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """In the order of token ids. JSON has no numbers as keys, so ids come as text."""
    if len(given) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(given)} entries; at most {MAX_BIASES} are allowed", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= len(str(vocab_size))
        if not is_number or int(key) >= vocab_size:
            raise RequestError(
                f"logit_bias: {key[:40]!r} is not a token of this model, whose ids are 0 to {vocab_size - 1}",
                "logit_bias",
            )
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if "" in strings:
        raise RequestError("stop holds an empty string, which would end every answer at once; leave it out", "stop")
    if any(len(string) > MAX_STOP_CHARACTERS for string in strings):
        raise RequestError(f"stop holds a string of more than {MAX_STOP_CHARACTERS} characters; shorten it", "stop")
    return tuple(strings)


def _seed(seed: int | None) -> int:
    """An unsigned 64-bit number; negative ones wrap around, and who gives none gets a random one."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise RequestError("seed must be a 64-bit integer", "seed")
    return seed % 2**64
