"""Definitions of sampling, of one row at a time, and of what changes the logits before it."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How to sample a row; a temperature below 1e-7, top_p 0 or top_k 1 is greedy, top_k 0 or less is off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0


def sample(logits: Tensor, rule: SamplingRule) -> int:
    """The token of `logits` `[vocab_size]`: the argmax, the lowest id among equals, of the logits or of noisy ones.

    -1 if the highest logit is not finite or some logit is not a number.
    """
    values = [float(x) for x in logits]
    best = max(values)
    if any(math.isnan(x) for x in values) or math.isinf(best):
        return -1
    if rule.temperature < 1e-7 or rule.top_p == 0.0 or rule.top_k == 1:
        return values.index(best)

    def score(token_id: int) -> float:
        return (values[token_id] - best) / rule.temperature + gumbel(rule, token_id)

    return max(sorted(kept_tokens(values, rule)), key=score)


def kept_tokens(values: list[float], rule: SamplingRule) -> set[int]:
    """The tokens that pass top-k, then top-p among these, and min-p; those of equal logits stay or go together."""
    order = sorted(range(len(values)), key=lambda token_id: -values[token_id])
    best = values[order[0]]
    if 0 < rule.top_k < len(values):
        order = [token_id for token_id in order if values[token_id] >= values[order[rule.top_k - 1]]]
    if rule.top_p < 1:
        weights = [math.exp((values[token_id] - best) / rule.temperature) for token_id in order]
        wanted, mass, last = rule.top_p * math.fsum(weights), 0.0, order[0]
        for token_id, weight in zip(order, weights, strict=True):
            mass, last = mass + weight, token_id
            if mass >= wanted:
                break
        order = [token_id for token_id in order if values[token_id] >= values[last]]
    if rule.min_p > 0:
        needed = best + math.log(rule.min_p) * rule.temperature
        order = [token_id for token_id in order if values[token_id] >= needed]
    return set(order)


def gumbel(rule: SamplingRule, token_id: int) -> float:
    """Counted Gumbel(0, 1) noise: word token_id % 4 of Philox-4x32-10 (Salmon et al., SC'11) under the seed, of the
    counter (token_id // 4, position, choice, 0)."""
    counter = [token_id // 4, rule.position, rule.choice, 0]
    low, high = rule.seed & 0xFFFFFFFF, rule.seed >> 32
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product1 >> 32) ^ counter[1] ^ low,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ counter[3] ^ high,
            product0 & 0xFFFFFFFF,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    uniform = ((counter[token_id % 4] >> 9) + 0.5) * 2.0**-23
    return -math.log(-math.log(uniform))


def apply_penalties(
    logits: Tensor,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """`logits` `[vocab_size]` after the penalties.

    Repetition (Keskar et al., 2019: CTRL) divides positive logits of tokens that occurred, and multiplies others; then
    a token of the output loses `frequency` for each occurrence there, and `presence` once.
    """
    result = logits.double()
    for token_id in {*prompt_token_ids, *output_token_ids}:
        logit = float(logits[token_id])
        logit = logit / repetition if logit > 0 else logit * repetition
        count = output_token_ids.count(token_id)
        result[token_id] = logit - (frequency * count + (presence if count else 0.0))
    return result.to(logits.dtype)
