"""Probe: is a request answered? Sends one through a prefill and a decode worker now and then; /ready shows the result.

It runs at the start, when a worker comes or goes, and every INTERVAL_S while no token came from real requests. A GET
starts nothing.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..core.messages import Message, NodeRef, Role, WorkerInfo
from ..core.timeline import Timeline
from .dispatcher import Dispatcher
from .generation import Generation, Unavailable
from .membership import Membership
from .prompts import Prompt

INTERVAL_S = 10.0
RETRY_S = 1.0  # after a failure
TIMEOUT_S = 30.0
NAMESPACE = "probe"  # so that probes never answer from, or enter, the caches of clients

logger = logging.getLogger(__name__)


class Problem(NamedTuple):
    """What went wrong with a probe. `may_be_busy`: other requests made progress meanwhile."""

    text: str
    may_be_busy: bool


class Probe:
    """`expected_*`: how many workers of each kind the launcher starts; one of each kind that is expected must be there.

    Readiness is the result of the last probe. A failed one counts only if no other request made progress meanwhile:
    then the workers are busy, not broken.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        membership: Membership,
        prompt: Prompt,
        *,
        expected_prefill: int,
        expected_decode: int,
    ):
        self._dispatcher = dispatcher
        self._membership = membership
        self._prompt = prompt
        self._expected = {Role.PREFILL: expected_prefill, Role.DECODE: expected_decode}
        self._wake = asyncio.Event()
        self._round = 0
        self._problem = "no probe has been answered yet"
        self._has_warned = False

    @property
    def ready(self) -> bool:
        return self._missing() is None and not self._problem and not self._dispatcher.is_draining

    def report(self) -> dict[str, Any]:
        """The body of /ready."""
        problem = "draining" if self._dispatcher.is_draining else self._missing() or self._problem
        workers = {
            role.value: {"expected": expected, "present": len(self._membership.with_role(role))}
            for role, expected in self._expected.items()
        }
        return {"ready": self.ready, "problem": problem or None, "workers": workers}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wake.clear()
            if self._missing() is None:
                await self._probe()
            await self._sleep(RETRY_S if self._problem else INTERVAL_S)

    # ---- listener -------------------------------------------------------------------------------------------------

    def worker_joined(self, info: WorkerInfo) -> None:
        self._wake.set()

    def worker_left(self, info: WorkerInfo) -> None:
        self._wake.set()

    def handle(self, sender: NodeRef, body: Message) -> None:
        """Messages say nothing about readiness; answered probes do."""

    def tick(self, now: float) -> None:
        """The probe has its own clock."""

    # ---- one probe ------------------------------------------------------------------------------------------------

    def _missing(self) -> str | None:
        """The kind of worker that is not there. A prefill worker that was given another role instead has joined."""
        needed = [role for role in Role if role is Role.DECODE or self._expected[role]]
        started = {role for worker in self._membership.workers.values() for role in worker.info.roles}
        missing = [
            role.value
            for role in needed
            if not self._membership.with_role(role) and (role is Role.DECODE or role not in started)
        ]
        return f"no {' and no '.join(missing)} worker has joined" if missing else None

    async def _probe(self) -> None:
        """Goes through the pairs of workers in turn; one answer is enough."""
        problems = []
        for pair in self._pairs():
            problem = await self._ask(pair)
            if problem is None:
                if self._has_warned:
                    logger.info("ready again")
                self._problem, self._has_warned = "", False
                return
            problems.append(problem)
        # A worker that is silent while others get tokens is busy; one that does its part wrongly is not.
        problem = next((problem for problem in problems if not problem.may_be_busy), None)
        if problem is not None:
            if not self._problem:
                logger.warning("not ready: %s", problem.text)
                self._has_warned = True
            self._problem = problem.text

    def _pairs(self) -> list[tuple[NodeRef, NodeRef | None]]:
        """As many pairs as it takes to use every worker once, beginning elsewhere each time.

        A worker with both roles hands nothing over to itself: where there is no other, it computes the prompt.
        """
        decode = [worker.info.ref for worker in self._membership.with_role(Role.DECODE)]
        prefill = [worker.info.ref for worker in self._membership.with_role(Role.PREFILL)]
        self._round += 1
        turns = range(self._round, self._round + max(len(decode), len(prefill)))
        return [(decode[turn % len(decode)], _other(prefill, decode[turn % len(decode)], turn)) for turn in turns]

    async def _ask(self, pair: tuple[NodeRef, NodeRef | None]) -> Problem | None:
        """What went wrong; None when a token came, and its prompt from the prefill worker that was named."""
        before = self._tokens_computed(pair)
        started = time.monotonic()
        changed = asyncio.Event()
        try:
            [generation] = self._dispatcher.submit(self._prompt, NAMESPACE, Timeline(), changed, pinned=pair)
        except Unavailable as error:
            return Problem(str(error), self._others_progress(before, started))
        names = " and ".join(ref.node_id for ref in pair if ref is not None)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await _ended(generation, changed)
        except TimeoutError:
            text = f"{names} did not answer a probe within {TIMEOUT_S:g} s"
            return Problem(text, self._others_progress(before, started))
        finally:
            self._dispatcher.cancel(generation, "the probe is over")
        if generation.error is not None:
            text = f"{names} did not answer a probe: {generation.error}"
            return Problem(text, self._others_progress(before, started))
        if pair[1] is not None and generation.timeline.copy_ns == 0:
            text = f"{pair[1].node_id} did not hand a probe over; {pair[0].node_id} had to compute it"
            return Problem(text, may_be_busy=False)
        return None

    def _others_progress(self, before: dict[NodeRef, int], started: float) -> bool:
        """Did another request get a token, or one of the workers compute more than the probe itself asks for?

        A long prompt keeps a worker for minutes without a token. The probe's own tokens must not count: a prefill
        worker that computed them does not excuse a decode worker that is stuck.
        """
        if self._dispatcher.last_progress > started:
            return True
        own_tokens = len(self._prompt.token_ids) + self._prompt.sampling.max_tokens
        after = self._tokens_computed(before)
        return any(after[ref] - before[ref] > own_tokens for ref in after)

    def _tokens_computed(self, refs: Iterable[NodeRef | None]) -> dict[NodeRef, int]:
        """Of those workers that are in the table and have reported."""
        found = {ref: self._membership.workers.get(ref) for ref in refs if ref is not None}
        return {ref: w.status.num_tokens_computed for ref, w in found.items() if w is not None and w.status is not None}

    async def _sleep(self, seconds: float) -> None:
        """Until something changes or a probe is due; tokens of real requests put it off."""
        due = time.monotonic() + seconds
        while not self._wake.is_set():
            if not self._problem:
                due = max(due, self._dispatcher.last_progress + seconds)
            if (left := due - time.monotonic()) <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                continue


def _other(prefill: list[NodeRef], decode: NodeRef, turn: int) -> NodeRef | None:
    others = [ref for ref in prefill if ref != decode]
    return others[turn % len(others)] if others else None


async def _ended(generation: Generation, changed: asyncio.Event) -> None:
    while not generation.ended:
        changed.clear()
        await changed.wait()
