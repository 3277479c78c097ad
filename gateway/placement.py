"""Placement: where a generation can go now, and the books of what was sent where (credit and load). No I/O."""

import math
from collections.abc import Collection

from ..core.messages import STATUS_INTERVAL_S, NodeRef, Role, WorkerInfo
from ..core.timeline import Timeline
from ..radix_cache.index import PrefixIndexes
from .admission import Admission
from .capacity import Outlook, Targets, mean_machine
from .forecast import Speed, pool_waits, speeds
from .generation import Attempt, Generation, Unavailable
from .measuring import Measuring
from .membership import Membership, Worker
from .metrics import Metrics
from .prompts import Limits
from .router import Route, Router
from .ways import Candidate

PAUSE_S = 0.5


class Placement:
    """Puts admission (who may have more) and router (who is best) together.

    `expected_prefill`: while the first of that many prefill workers has not come, nothing is placed at all: decode
    workers could do everything themselves, but the first requests of a server would then not be what was asked for.
    """

    def __init__(
        self,
        membership: Membership,
        index: PrefixIndexes,
        admission: Admission,
        metrics: Metrics,
        expected_prefill: int,
        tpot_target_s: float | None = None,
        *,
        may_be_local: bool = True,
    ):
        self._membership = membership
        self._index = index
        self._admission = admission
        self._metrics = metrics
        self._may_be_local = may_be_local
        self._router = Router(may_be_local=may_be_local)
        self._measuring = Measuring(tpot_target_s)
        self._known: dict[NodeRef, Speed] = {}
        self._known_at = -math.inf
        self._awaits_prefill = expected_prefill > 0
        self._paused_until: dict[NodeRef, float] = {}

    def worker_joined(self, info: WorkerInfo) -> None:
        if Role.PREFILL in info.roles:
            self._awaits_prefill = False
        # Whatever its roles are now: it may be given the decode role later.
        self._admission.credits.add_worker(
            info.ref, block_size=info.block_size, num_blocks=info.num_blocks, max_running=info.max_running
        )

    def worker_left(self, info: WorkerInfo) -> None:
        """What was sent to it must have been `given_back`, or routed without it, before it may come back."""
        self._router.forget(info.ref)
        self._paused_until.pop(info.ref, None)
        self._admission.credits.remove_worker(info.ref)

    def limits(self, model_context: int) -> Limits:
        """What a request may take: the largest decode worker there is, or the model's own while there is none."""
        workers = self._membership.with_role(Role.DECODE)
        context_length = max((w.info.context_length for w in workers), default=model_context)
        return Limits(context_length, max((w.pool_tokens for w in workers), default=model_context))

    def pause(self, ref: NodeRef, now: float) -> None:
        """The worker refused a request or lost messages: it is given nothing for a moment."""
        self._paused_until[ref] = now + PAUSE_S

    def choose(self, generation: Generation, now: float, without: Collection[NodeRef] = ()) -> Route | None:
        """Where it can go now, `without` some of the decode workers; None: it must wait."""
        if self._awaits_prefill:
            return None
        token_ids = generation.token_ids
        num_tokens, total = len(token_ids), len(token_ids) + generation.remaining_tokens
        credit = set(self._admission.credits.with_credit(generation.ask, now))
        decode = [w for w in self._membership.with_role(Role.DECODE) if w.info.ref in credit and _holds(w, total)]
        decode = [w for w in decode if w.info.ref not in without and self._paused_until.get(w.info.ref, now) <= now]
        if not decode:
            return None
        prefill = [w for w in self._membership.with_role(Role.PREFILL) if _holds(w, num_tokens)]
        cached = self._index.match(generation.namespace, token_ids)
        if generation.lacks_prompt_logprobs:  # the decode worker computes all of it
            prefill, cached = [], {}
        speed = self._speeds(now)
        self._router.measured = self._measuring.measured
        return self._router.choose(
            num_tokens,
            [Candidate(w.info.ref, cached.get(w.info.ref.node_id, 0), speed.get(w.info.ref)) for w in decode],
            [Candidate(w.info.ref, cached.get(w.info.ref.node_id, 0), speed.get(w.info.ref)) for w in prefill],
            now,
            is_batch=generation.urgency.is_batch,
            num_choices=len(generation.party),
        )

    def holders(self, generation: Generation) -> set[NodeRef]:
        """Decode workers that could serve it if they were idle."""
        total = len(generation.prompt.token_ids) + generation.prompt.sampling.max_tokens
        return {worker.info.ref for worker in self._membership.with_role(Role.DECODE) if _holds(worker, total)}

    def others(self, refs: Collection[NodeRef]) -> bool:
        """Are there decode workers besides these?"""
        return any(worker.info.ref not in refs for worker in self._membership.with_role(Role.DECODE))

    def num_missing(self, generation: Generation) -> int:
        """Tokens of its prompt that no worker has cached, as far as is known here; at least one is computed."""
        cached = self._index.match(generation.namespace, generation.token_ids)
        return max(len(generation.token_ids) - max(cached.values(), default=0), 1)

    def misfit(self, generation: Generation) -> Unavailable | None:
        """Why it fits none of the decode workers, however idle; None when it fits one, or none is here (any may come).

        The worker that it was accepted for has left. It must not hold up those behind it until its time is over.
        """
        if not self._membership.with_role(Role.DECODE) or self.holders(generation):
            return None
        total = len(generation.token_ids) + generation.remaining_tokens
        return Unavailable(f"the worker that holds {total} tokens has left; lower max_tokens or try again later")

    def refusal(self, generation: Generation, now: float) -> Unavailable:
        """What to tell a request that has waited for too long."""
        retry_after = self._admission.retry_after(now, is_batch=generation.urgency.is_batch)
        if self._awaits_prefill or not self._membership.with_role(Role.DECODE):
            kind = Role.PREFILL if self._awaits_prefill else Role.DECODE
            return Unavailable(f"there is no {kind} worker now; try again later", 503, retry_after)
        text = f"all workers are busy; the request waited too long for one; try again in {retry_after} s"
        return Unavailable(text, 429, retry_after)

    def take(self, generation: Generation, attempt: Attempt, now: float) -> None:
        """The attempt is about to be sent, for the party of `generation`: it counts from now on."""
        if attempt.has_credit:
            others = [other.key for other in attempt.party if other is not generation]
            self._admission.credits.take(generation.key, attempt.route.decode, generation.ask, now, others)
            self._metrics.routed(attempt.route.way)
            if not (generation.urgency.is_batch or generation.was_dispatched):
                self._measuring.sent(attempt.route.work, attempt.route.num_tokens, now)
        self._router.dispatched(attempt.route, now)

    def first_token(self, attempt: Attempt, timeline: Timeline | None, now: float) -> None:
        """It has come. `timeline` is what the workers stamped."""
        route = attempt.route
        attempt.prompt_done = True
        self._router.prompt_done(route, now)
        if route.ttft_s is not None and not route.is_batch:  # batch makes way for whoever comes later
            measured_s = now - route.chosen_at
            self._metrics.ttft_predicted(measured_s / route.ttft_s)
            self._measuring.first_token(route.ttft_s, measured_s)
            self._admission.first_token(route.ttft_s, measured_s)
        if timeline is not None and route.prefill is not None and timeline.copy_ns:
            self._measuring.handed_over(route.decode_missing + route.num_returned_tokens, timeline.copy_ns / 1e9)

    def give_back(self, generation: Generation, attempt: Attempt, now: float, *, was_served: bool) -> None:
        """This choice has left the attempt. `was_served`: with an answer, or as much of it as its client wanted."""
        if not attempt.party:
            if not attempt.prompt_done:
                self._router.prompt_done(attempt.route, now)
            self._router.ended(attempt.route)
        if attempt.has_credit:
            self._admission.release(generation.key, now, was_served=was_served)

    def answered(self, num_tokens: int, now: float, *, was_cut: bool) -> None:
        """A request has got its answer, in however many attempts; `was_cut`: by its max_tokens."""
        self._measuring.answered(num_tokens, now)
        self._admission.credits.answered(num_tokens, was_cut=was_cut)

    def without_prefill(self, attempt: Attempt, prefill: NodeRef, now: float) -> None:
        """`prefill` is gone: if the attempt goes through it, its decode worker now computes the prompt."""
        route = attempt.route
        if route.prefill != prefill:
            return
        attempt.route = route.without_prefill()
        if not attempt.prompt_done:
            self._router.rerouted(route, attempt.route, now)

    # ---- what is to be expected --------------------------------------------------------------------------------

    def prompt_tokens(self, now: float) -> float | None:
        """That are computed of a request of late, on average; None: there were too few."""
        mix = self._measuring.mix(now)
        return None if mix is None else sum(prompt.share * prompt.work.num_tokens for prompt in mix.prompts)

    def start_s(self, position: int, now: float) -> float | None:
        """Seconds until so many places have come free, by what steps cost; None while that is not known of anybody.

        Each step is taken to be like the present one. Whoever gets a place keeps it as long as those that are there
        have theirs, so that later places come free in rounds.
        """
        ends: list[float] = []
        for ref, speed in self._speeds(now).items():
            ends += self._admission.credits.ends_s(ref, self._router.step_s(ref, speed))
        if not ends:
            return None
        ends.sort()
        rounds, index = divmod(position - 1, len(ends))
        return rounds * ends[-1] + ends[index]

    def backlogs(self, now: float) -> dict[NodeRef, dict[Role, float]]:
        """Seconds until a prompt sent there now would be begun, by role; without those of which nothing is known."""
        return {
            ref: {
                role: self._router.backlog_s(ref, speed, now, as_prefill=role is Role.PREFILL)
                for role in self._membership.workers[ref].roles
            }
            for ref, speed in self._speeds(now).items()
            if ref in self._membership.workers
        }

    def pool_waits(self, now: float) -> tuple[float, float]:
        """Seconds that a newcomer waits for a prefill worker, and for a place on a decode worker."""
        backlogs = [by_role[Role.PREFILL] for by_role in self.backlogs(now).values() if Role.PREFILL in by_role]
        queue_s = self._admission.queue_s(now)
        return pool_waits(backlogs, queue_s, self._router.num_prompting, self._router.num_decoding)

    def outlook(self, now: float, targets: Targets) -> Outlook | None:
        """What the capacity of any division of the workers follows from; None: too little is known."""
        workers, speed, mix = self._membership.workers.values(), self._speeds(now), self._measuring.mix(now)
        decoding = [speed[w.info.ref] for w in workers if w.info.ref in speed and Role.DECODE in w.roles]
        if mix is None or not decoding:
            return None
        measured = self._measuring.measured
        pool_tokens = sum(worker.pool_tokens for worker in workers) // len(workers)
        machine = mean_machine(speed.values(), decoding, pool_tokens)
        return Outlook(mix, machine, targets, measured.transfer_s, measured.overhead_s, self._may_be_local)

    def _speeds(self, now: float) -> dict[NodeRef, Speed]:
        """Of those workers that something is known of; as old as their own reports may be."""
        if now - self._known_at >= STATUS_INTERVAL_S:
            self._known, self._known_at = speeds(self._membership.workers.values()), now
        return self._known


def _holds(worker: Worker, num_tokens: int) -> bool:
    return num_tokens <= min(worker.info.context_length, worker.pool_tokens)
