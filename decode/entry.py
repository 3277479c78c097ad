"""DecodeEntry: what the decode role remembers of one request beside its sequence, and the words it has for it."""

import time
from dataclasses import dataclass, field
from functools import cached_property

from ..core.latency import time_per_output_token
from ..core.messages import NodeRef, TokenChunk
from ..core.request import FinishReason, Request, TokenLogprobs
from ..core.sequence import Sequence
from ..core.timeline import Station, Timeline
from ..engine.forward_batch import Chunk
from ..engine.sampler import SamplingRow
from ..engine.token_counts import TokenCounts
from .constraint import Constraint, Words
from .output import finish_reason, suppressed_tokens
from .prompt_scores import PromptScores


@dataclass(eq=False)
class DecodeEntry:
    """One choice of a request. `choice` may change until its first token is launched (see forks.py)."""

    request: Request
    choice: int
    sequence: Sequence
    gateway: NodeRef
    prefill: NodeRef | None
    timeline: Timeline
    num_returned_tokens: int  # of its cached prefix, for the prefill worker
    is_lead: bool = True  # of the choices of its request; the others share its prompt's blocks
    feedback_slot: int = -1  # where the device keeps its newest token; -1 while it waits
    num_cached_tokens: int | None = None  # None until known; reported with the first chunk
    has_reported: bool = False
    constraint: Constraint | None = None  # of its grammar, once that is compiled
    prompt_scores: PromptScores | None = field(init=False, default=None)  # where they are asked for

    def __post_init__(self) -> None:
        request = self.request
        if request.num_prompt_logprobs is not None and not request.output_token_ids:  # else they have been told
            self.prompt_scores = PromptScores(request.prompt_token_ids, request.num_prompt_logprobs)
            self.sequence.max_cached_tokens = 0
            self.prefill = None

    @cached_property
    def _counts(self) -> TokenCounts | None:
        """Of the tokens known so far, for the penalties; frequency and presence do not look at the prompt."""
        sampling, sequence = self.request.sampling, self.sequence
        if not sampling.has_penalties:
            return None
        prompt = sequence.token_ids[: sequence.num_prompt_tokens] if sampling.repetition_penalty != 1.0 else ()
        return TokenCounts(prompt, sequence.token_ids[sequence.num_prompt_tokens :])

    def sampling_row(self, allowed: Words | None) -> SamplingRow:
        """How to sample the next token. `allowed`: what its constraint lets come, if it has one."""
        sampling, sequence = self.request.sampling, self.sequence
        suppress = suppressed_tokens(sequence.num_output_tokens, sampling) if allowed is None else ()
        return SamplingRow(
            sampling, self.choice, sequence.num_tokens, suppress, self.feedback_slot, self._counts, allowed
        )

    @property
    def num_own_prompt_tokens(self) -> int:
        """Of all choices together those of the prompt, once: its blocks are there once."""
        return self.request.num_prompt_tokens if self.is_lead else 0

    @property
    def may_end(self) -> bool:
        """Whether an end token is wanted as the next one."""
        return self.sequence.num_output_tokens >= self.request.sampling.min_tokens

    @property
    def awaits_token(self) -> bool:
        """Its next token depends on the value of one that is not known yet: it sits steps out until then."""
        return self.sequence.num_pending_tokens > 0 and self.request.sampling.needs_known_tokens

    @property
    def why_no_token(self) -> str:
        """What is wrong when no token can be sampled."""
        constraint = self.constraint
        return constraint.error if constraint is not None and constraint.error else "the model's logits are not finite"

    @property
    def samples_nothing(self) -> bool:
        """Only the prompt's own log-probabilities are wanted."""
        return self.request.sampling.max_tokens == 0

    def chunk(self, num_tokens: int, *, is_decode: bool) -> Chunk:
        """The next tokens of its sequence. One that is still pending is read on the device, where it was sampled."""
        sequence = self.sequence
        start, stop = sequence.num_launched_tokens, sequence.num_launched_tokens + num_tokens
        is_pending = stop > len(sequence.token_ids)
        return Chunk(
            token_ids=[0] if is_pending else sequence.token_ids[start:stop],
            start=start,
            block_table=sequence.block_table,
            wants_hidden=stop == sequence.num_tokens,
            is_decode=is_decode,
            feedback_slot=self.feedback_slot if is_pending else -1,
            wants_every_hidden=self.prompt_scores is not None and bool(self.prompt_scores.targets(start, stop)),
        )

    @property
    def has_all_tokens(self) -> bool:
        """Every token the request may have is known or pending: no further step is planned for it."""
        return self.sequence.num_output_tokens >= self.request.sampling.max_tokens

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenChunk:
        """Append the oldest pending token; the message that tells of it, with everything that is told only once."""
        sequence = self.sequence
        index = sequence.num_known_output_tokens
        sequence.append(token_id)
        reason = finish_reason(token_id, index + 1, self.request.sampling)
        if self._counts is not None:
            self._counts.add(token_id)
        if self.constraint is not None and reason is not FinishReason.STOP:
            reason = self._constrained(token_id, reason)
        return self._tell(index, [token_id], reason, None if logprobs is None else [logprobs])

    def take_nothing(self) -> TokenChunk:
        """The one message of a request that samples nothing."""
        return self._tell(0, [], FinishReason.LENGTH, None)

    def _constrained(self, token_id: int, reason: FinishReason | None) -> FinishReason | None:
        """An end of the grammar ends the answer, also where `ignore_eos` passes over ends of its own accord."""
        assert self.constraint is not None
        if self.constraint.is_end(token_id):
            return FinishReason.STOP
        self.constraint.advance(token_id)
        return reason

    def _tell(
        self,
        index: int,
        token_ids: list[int],
        reason: FinishReason | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> TokenChunk:
        first, self.has_reported = not self.has_reported, True
        if first:
            self.stamp_once(Station.FIRST_TOKEN)
        return TokenChunk(
            self.request.request_id,
            choice=self.choice,
            index=index,
            token_ids=token_ids,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens if first else None,
            timeline=self.timeline if first else None,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_scores.read() if first and self.prompt_scores is not None else None,
        )

    def time_per_output_token(self) -> float | None:
        """Seconds from one token to the next so far, of those sampled here; None for fewer than two."""
        num_tokens = self.sequence.num_known_output_tokens - len(self.request.output_token_ids)
        first_at = self.timeline.stamps[Station.FIRST_TOKEN]
        return time_per_output_token(0.0, (time.monotonic_ns() - first_at) / 1e9, num_tokens)

    def count_cached(self, num_cached_tokens: int) -> None:
        """Remember what was found in a cache when the request first got its blocks; of the prompt only."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(num_cached_tokens, self.request.num_prompt_tokens)

    def stamp_once(self, *stations: Station) -> None:
        now = time.monotonic_ns()
        for station in stations:
            if station not in self.timeline.stamps:
                self.timeline = self.timeline.stamped(station, now)
