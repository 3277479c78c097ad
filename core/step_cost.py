"""StepCost: how long one forward pass takes, as a worker has learned it. It travels to the gateways in Status.

    seconds = base + per_prompt_token * T + per_product * X + per_decode * B + per_context * S

T prompt tokens, X the sum over prompt chunks of new * (start + new / 2) (the query-key pairs of causal attention), B
sequences that decode one token each, S the tokens they attend to. The form is that of DistServe (OSDI'24, appendix A)
with prompts and decodes in one step.
"""

import msgspec

LEAST_SAMPLES = 30
GREATEST_ERROR = 0.5
TARGET_MARGIN = 0.05  # of a TPOT target, kept free
_BURST = 0.25  # of what an answer may be late by, that one chunk of prompt may take


class StepShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The lengths of one forward pass that its duration depends on."""

    num_prompt_tokens: int = 0
    prompt_products: float = 0.0  # sum of `chunk_products` over the chunks
    num_decodes: int = 0
    decode_context: int = 0  # tokens, over all decodes

    @property
    def is_empty(self) -> bool:
        return self.num_prompt_tokens == 0 and self.num_decodes == 0


class StepCost(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Coefficients in seconds, none negative. `relative_error` is the running mean of |measured / predicted - 1|.

    Terms that a worker's steps never had are guesses: see `knows_prompts` and `knows_decodes`.
    """

    base_s: float
    per_prompt_token_s: float
    per_product_s: float
    per_decode_s: float
    per_context_s: float
    num_samples: int = 0  # steps they were learned from
    relative_error: float = 1.0
    num_prompt_samples: int = 0  # of those steps that held prompt tokens
    num_decode_samples: int = 0  # that held decodes

    @property
    def is_trusted(self) -> bool:
        """It was learned from enough steps, and predicts such steps roughly."""
        return self.num_samples >= LEAST_SAMPLES and self.relative_error <= GREATEST_ERROR

    @property
    def knows_prompts(self) -> bool:
        """What a prompt costs is learned, not guessed."""
        return self.is_trusted and self.num_prompt_samples >= LEAST_SAMPLES

    @property
    def knows_decodes(self) -> bool:
        return self.is_trusted and self.num_decode_samples >= LEAST_SAMPLES

    def seconds(self, shape: StepShape) -> float:
        return (
            self.base_s
            + self.per_prompt_token_s * shape.num_prompt_tokens
            + self.per_product_s * shape.prompt_products
            + self.per_decode_s * shape.num_decodes
            + self.per_context_s * shape.decode_context
        )

    def seconds_of(self, steps: "StepTotals") -> float:
        """Of many steps together: the cost is linear in the lengths."""
        return (
            self.base_s * steps.num_steps
            + self.per_prompt_token_s * steps.num_prompt_tokens
            + self.per_product_s * steps.prompt_products
            + self.per_decode_s * steps.num_decodes
            + self.per_context_s * steps.decode_context
        )


class StepTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All forward passes of a worker since its start: the seconds they took, and their lengths added up."""

    num_steps: int = 0
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    prompt_products: float = 0.0
    num_decodes: int = 0
    decode_context: int = 0

    def plus(self, shape: StepShape, seconds: float) -> "StepTotals":
        """One more step; an empty one (only sampling) is no forward pass."""
        if shape.is_empty:
            return self
        return StepTotals(
            self.num_steps + 1,
            self.seconds + seconds,
            self.num_prompt_tokens + shape.num_prompt_tokens,
            self.prompt_products + shape.prompt_products,
            self.num_decodes + shape.num_decodes,
            self.decode_context + shape.decode_context,
        )


def prompt_share_s(within_s: float, step_s: float, mean_s: float, answer_tokens: float) -> float:
    """Seconds that the prompts of one decode step may take: what its decodes (`step_s`) leave of the target, or part of
    what the mean over an answer leaves of it (steps take `mean_s` with their prompts): a chunk makes it longer once.
    """
    return max(within_s - step_s, answer_tokens * _BURST * (within_s - mean_s))


def chunk_products(start: int, num_tokens: int) -> float:
    """Query-key pairs of `num_tokens` new tokens behind `start` earlier ones. Adds up over the parts of a chunk."""
    return num_tokens * (start + num_tokens / 2)
