"""RoleShare: what the two roles of one worker leave each other. Pure; sim/ drives the same.

Time. A turn of the worker's loop gives each role one step, so what is generated here waits for the prefill step of its
turn. The decode role says with each of its plans how many prompt tokens a turn may hold:

    tokens of the prefill step = what a turn may hold - prompt tokens of decode's own step - base / per_prompt_token

The last term is what a step of its own costs beside its tokens; it counts where there is a target for the time per
token, from which the decode role's tuner has derived what a turn may hold.

Blocks. A prompt keeps its blocks until the decode worker has taken its KV, and that one takes it when it has blocks.
Two workers that prefill for each other could so wait for each other, each with a pool full of prompts for the other:

    A: prompts for B hold the pool, requests of A wait for blocks  <-->  B: prompts for A hold the pool, ...

So on a worker that gateways give both roles prompts hold half of the pool at most, and where it happens all the same
(longer prompts, roles that have just changed) the prefill role gives hand-overs up after PATIENCE_S, one at a time.

Two workers with one role each can wait for each other as well, because their queues are not in the same order:

    P: computed prompts hold the pool, D takes others first  <-->  D: those others have its places, and wait for P

So P gives hand-overs up also while D has blocks for the next prompt, and for none of those that P has blocks for.
"""

import math

from ..core.step_cost import StepCost

MIN_SHARE = 4  # the prefill role gets at least 1/4 of the prompt tokens of a turn: neither role starves the other
PATIENCE_S = 1.0


class Patience:
    """Of one who waits for blocks that come back only through another worker, which may in turn wait for this one."""

    def __init__(self) -> None:
        self._since: float | None = None

    def waits(self, now: float, *, others_end: bool) -> None:
        """There are no blocks for the next request. `others_end`: of those that hold some here one will end, and give
        its own back, whatever other workers do.
        """
        if others_end:
            self._since = None
        elif self._since is None:
            self._since = now

    def waits_no_more(self) -> None:
        """The next request got its blocks, or there is none."""
        self._since = None

    def is_over(self, now: float) -> bool:
        """It has waited for PATIENCE_S. Once in that time."""
        if self._since is None or now - self._since < PATIENCE_S:
            return False
        self._since = now
        return True


class RoleShare:
    """One per worker. While nothing is decoded, and only one role is given requests, there is nothing to share.

    `has_both_roles` is set by the worker's loop.
    """

    def __init__(self, num_blocks: int, *, has_target: bool = False):
        self._num_blocks = num_blocks
        self._has_target = has_target
        self.has_both_roles = False
        self._is_decoding = False
        self._left = self._least = 0
        self.decode_patience = Patience()
        self.prefill_patience = Patience()

    # ---- time --------------------------------------------------------------------------------------------------

    def planned(self, num_decodes: int, prompt_budget: int, num_prompt_tokens: int) -> None:
        """A step of the decode role: so many decodes, beside which a turn may compute `prompt_budget` prompt tokens,
        and so many that it computes itself.
        """
        self._is_decoding = num_decodes > 0
        self._left, self._least = prompt_budget - num_prompt_tokens, max(prompt_budget // MIN_SHARE, 1)

    def limited(self, token_budget: int, cost: StepCost) -> int:
        """The most tokens of the next prefill step, of the `token_budget` it would have alone."""
        if not self._is_decoding:
            return token_budget
        own = 0
        if self._has_target and cost.knows_prompts and cost.per_prompt_token_s > 0:
            own = math.ceil(cost.base_s / cost.per_prompt_token_s)
        return min(token_budget, max(self._left - own, self._least))

    # ---- blocks ------------------------------------------------------------------------------------------------

    def may_hold(self, num_held: int, num_more: int) -> bool:
        """May prompts that hold so many blocks be joined by one that needs so many? Always, when they hold none."""
        return not self.has_both_roles or num_held == 0 or num_held + num_more <= self._num_blocks // 2

    def must_give_up(self, now: float) -> bool:
        """Is a hand-over to be given up for its blocks?"""
        return self.decode_patience.is_over(now) or self.prefill_patience.is_over(now)
