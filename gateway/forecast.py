"""What the gateway expects of its workers in seconds, from what they have learned of their own steps. Pure.

A prompt of n tokens is computed in steps of at most b tokens, behind those B tokens that were sent there before:

    seconds(B) = ceil(B / b) * step + B * per_prompt_token + X * per_product      X: products, see core/step_cost.py
    wait       = seconds(B) - the time that the worker has been at it
    compute    = seconds(B + n) - seconds(B)

On a prefill worker b is its token budget and `step` what an empty step costs. On a decode worker b is the prompt budget
of a step, and each step carries the decodes too:

    decodes = per_decode * running + per_context * context      step = base + decodes

A worker that does both keeps its prefill steps as short as its decode steps may be, and they alternate:
step = 2 * base + decodes. What comes to a worker that decodes waits for half a step, the rest of the one that runs; on
a GPU for a whole one more, which has been launched behind that.

Workers with the same device compute alike, so who has not computed prompts yet (or not decoded) is taken to cost what
the most experienced of its kind has learned. So is who has computed far fewer: the few steps that it tried before it
joined, or those of a role that it had long ago, say little in the end, for what it has not computed since is guessed
together with what it does compute. While nobody of its kind knows what prompts cost, nothing is predicted.
"""

import math
from collections.abc import Iterable

import msgspec

from ..core.messages import NodeRef
from ..core.step_cost import LEAST_SAMPLES, StepCost, chunk_products
from .membership import Worker

_LAUNCHED_AHEAD = 1  # steps of a GPU
_FAR_MORE = 10  # times the samples
_LEAST_PROMPT_SHARE = 4  # a decode step whose prompt budget is not said leaves 1/4 of its tokens to prompts at least


class Work(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens to be computed, and the query-key pairs in them."""

    num_tokens: int = 0
    products: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_tokens + other.num_tokens, self.products + other.products)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.num_tokens - other.num_tokens, self.products - other.products)


def rest_of_prompt(num_tokens: int, num_missing: int) -> Work:
    """The last `num_missing` tokens of a prompt."""
    return Work(num_missing, chunk_products(num_tokens - num_missing, num_missing))


class Pace(msgspec.Struct, frozen=True, gc=False):
    """How fast one worker computes prompts, in one of its roles, beside what it decodes now."""

    step_s: float  # of each step, whatever prompts it carries
    per_prompt_token_s: float
    per_product_s: float
    budget: int  # prompt tokens of a step
    chunk_size: int  # of one prompt in a step
    join_s: float  # until the launched steps are over; 0 where nothing is decoded

    def tokens_s(self, work: Work) -> float:
        """What the tokens take, whatever steps they are in: so much later is whoever shares the device with them."""
        return self.per_prompt_token_s * work.num_tokens + self.per_product_s * work.products

    def seconds(self, work: Work) -> float:
        return self.step_s * -(-work.num_tokens // self.budget) + self.tokens_s(work)

    def compute_s(self, backlog: Work, work: Work) -> float:
        """What `work` takes once `backlog` is computed; the last step of that may have room for some of it."""
        before = -(-backlog.num_tokens // self.budget)
        after = max(-(-(backlog.num_tokens + work.num_tokens) // self.budget), -(-work.num_tokens // self.chunk_size))
        return self.step_s * (after - before) + self.tokens_s(work)


class Speed(msgspec.Struct, frozen=True, gc=False):
    """What is known of a worker, by its last Status and its like."""

    cost: StepCost
    token_budget: int  # of a prefill step
    chunk_size: int
    prompt_budget: int  # of a decode step
    held_tokens: int = 0  # of KV, by requests that run
    join_steps: float = 0.5  # decode steps that are launched before whatever comes now

    def decodes_s(self, num_decoding: int, context: int) -> float:
        """What the decodes add to a step. `context`: tokens they are known to attend to; the worker may hold more."""
        if not num_decoding:
            return 0.0
        return self.cost.per_decode_s * num_decoding + self.cost.per_context_s * max(context, self.held_tokens)

    def as_decode(self, num_decoding: int, context: int) -> Pace:
        """Prompts in mixed steps of the decode role."""
        cost = self.cost
        step_s = cost.base_s + self.decodes_s(num_decoding, context)
        join_s = self.join_steps * step_s if num_decoding else 0.0
        budget = self.prompt_budget
        return Pace(step_s, cost.per_prompt_token_s, cost.per_product_s, budget, budget, join_s)

    def as_prefill(self, num_decoding: int, context: int) -> Pace:
        """Prompts in steps of the prefill role."""
        cost = self.cost
        tokens, products = cost.per_prompt_token_s, cost.per_product_s
        if not num_decoding:
            return Pace(cost.base_s, tokens, products, self.token_budget, self.chunk_size, 0.0)
        budget = min(self.token_budget, self.prompt_budget)
        step_s = cost.base_s + self.decodes_s(num_decoding, context)
        chunk_size = min(self.chunk_size, budget)
        return Pace(cost.base_s + step_s, tokens, products, budget, chunk_size, self.join_steps * step_s)


def speeds(workers: Iterable[Worker]) -> dict[NodeRef, Speed]:
    """Of those workers that something is known of."""
    reporting = [(worker, worker.status) for worker in workers if worker.status is not None]
    costs = [(_kind(worker), status.step_cost) for worker, status in reporting if status.step_cost is not None]
    prompts = _Experience((kind, cost, cost.num_prompt_samples) for kind, cost in costs if cost.knows_prompts)
    decodes = _Experience((kind, cost, cost.num_decode_samples) for kind, cost in costs if cost.knows_decodes)
    found = {}
    for worker, status in reporting:
        kind, own = _kind(worker), status.step_cost
        prompt = prompts.of(kind, own, own.num_prompt_samples if own is not None else 0)
        budgets = _budgets(status.settings, status.num_running)
        if prompt is None or budgets is None:
            continue
        decode = decodes.of(kind, own, own.num_decode_samples if own is not None else 0) or own or prompt
        base = own if own is not None and own.is_trusted else prompt
        held_blocks = worker.info.num_blocks - status.available_blocks
        cost = StepCost(
            base.base_s, prompt.per_prompt_token_s, prompt.per_product_s, decode.per_decode_s, decode.per_context_s
        )
        found[worker.info.ref] = Speed(
            cost,
            *budgets,
            held_tokens=max(held_blocks, 0) * worker.info.block_size,
            join_steps=0.5 + (_LAUNCHED_AHEAD if worker.info.device_kind == "cuda" else 0),
        )
    return found


def _kind(worker: Worker) -> tuple[str, int]:
    return worker.info.device, worker.info.threads


class _Experience:
    """Of (kind, cost, samples it was learned from): the cost that was learned from the most, by kind."""

    def __init__(self, costs: Iterable[tuple[tuple[str, int], StepCost, int]]):
        self._best: dict[tuple[str, int], tuple[int, StepCost]] = {}
        for kind, cost, num_samples in costs:
            if kind not in self._best or num_samples > self._best[kind][0]:
                self._best[kind] = num_samples, cost

    def of(self, kind: tuple[str, int], own: StepCost | None, num_samples: int) -> StepCost | None:
        """What a worker of that kind is taken to cost, that knows its `own` from so many; None: nobody knows."""
        most, best = self._best.get(kind, (0, None))
        if own is None or not own.is_trusted:
            return best
        return own if num_samples >= max(LEAST_SAMPLES, most / _FAR_MORE) else best


def _budgets(settings: dict[str, int], num_running: int) -> tuple[int, int, int] | None:
    """Token budget, chunk size and prompt budget by the settings that a worker reports; None: it has not said them.

    A worker with both roles puts the role in front of a name that both have, but for the first.
    """
    tokens = settings.get("prefill token budget", settings.get("token budget"))
    mixed = settings.get("decode token budget", settings.get("token budget", 0))
    prompts = settings.get("prompt budget", max(mixed - num_running, mixed // _LEAST_PROMPT_SHARE))
    if tokens is None and not prompts:
        return None
    tokens = max(tokens or prompts, 1)
    return tokens, max(min(settings.get("chunk size", tokens), tokens), 1), max(prompts, 1)


def pool_waits(
    prefill_backlogs_s: Iterable[float], queue_s: float, num_prompting: int, num_decoding: int
) -> tuple[float, float]:
    """Seconds that a newcomer waits for (a prefill worker, a place on a decode worker).

    It goes to the prefill worker that is free first. Who waits in the gateway's queue, for `queue_s`, waits for places
    that others hold; those whose prompts are not computed yet hold theirs because of the prefill workers.
    """
    share = num_prompting / max(num_prompting + num_decoding, 1)
    backlog_s = min(prefill_backlogs_s, default=math.inf)
    return (backlog_s + share * queue_s if backlog_s < math.inf else share * queue_s), (1 - share) * queue_s
