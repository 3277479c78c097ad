"""SettingsCheck: says in the log what a user has set that cannot work as meant. A listener of the cluster; no I/O.

The gateway's settings are the ones that count for its queue and its refusals. A worker that was started by itself has
settings of its own, which order its queues and size its batches: where they differ, neither does what was asked for.

A target below what one request takes alone can be kept by nobody, however small the load. That is known as soon as a
worker has learned what its steps cost; prompts are taken to have SHORT_PROMPT tokens until those of real requests are
known.
"""

import logging
import math
from collections.abc import Callable

import msgspec

from ..core.messages import Message, NodeRef, Role, WorkerInfo
from ..core.queueing import POLICIES, QueuePolicy
from ..core.step_cost import StepCost
from .membership import Membership, Worker

LOOK_S = 1.0
SHORT_PROMPT = 16  # tokens

logger = logging.getLogger(__name__)


class Settings(msgspec.Struct, frozen=True):
    """What a gateway and its workers should agree on."""

    policy: QueuePolicy
    ttft_target_s: float | None
    tpot_target_s: float | None

    @property
    def flags(self) -> dict[str, str]:
        """As on the command line."""
        policy = next((name for name, policy in POLICIES.items() if policy == self.policy), "another")
        return {
            "--policy": policy,
            "--ttft-target": _in_words(self.ttft_target_s),
            "--tpot-target": _in_words(self.tpot_target_s),
        }


class SettingsCheck:
    """`prompt_tokens`: of a typical request of late, those that are computed; by the time, None while unknown."""

    def __init__(
        self, membership: Membership, settings: Settings, prompt_tokens: Callable[[float], float | None]
    ) -> None:
        self._membership = membership
        self._settings = settings
        self._prompt_tokens = prompt_tokens
        self._told: set[tuple[NodeRef, str]] = set()  # worker and flag: each is said once
        self._look_at = -math.inf

    def worker_joined(self, info: WorkerInfo) -> None:
        if (text := mismatch(info, self._settings)) is not None:
            logger.warning("%s", text)

    def worker_left(self, info: WorkerInfo) -> None:
        self._told = {told for told in self._told if told[0] != info.ref}

    def handle(self, sender: NodeRef, body: Message) -> None:
        """What workers have learned is looked at by the clock."""

    def tick(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        tokens = self._prompt_tokens(now)
        for worker in self._membership.workers.values():
            for flag, text in self._out_of_reach(worker, tokens):
                if (worker.info.ref, flag) not in self._told:
                    self._told.add((worker.info.ref, flag))
                    logger.warning("%s", text)

    def _out_of_reach(self, worker: Worker, prompt_tokens: float | None) -> list[tuple[str, str]]:
        """The flags of targets that this worker cannot keep, and what to say of each."""
        if worker.status is None or worker.status.step_cost is None:
            return []
        name, cost, found = worker.info.ref.node_id, worker.status.step_cost, []
        ttft_s, tpot_s = self._settings.ttft_target_s, self._settings.tpot_target_s
        if ttft_s is not None and cost.knows_prompts and self._computes_prompts(worker):
            alone_s = _prompt_alone_s(cost, prompt_tokens or SHORT_PROMPT)
            kind = "even a short" if prompt_tokens is None else "a typical"
            what = f"{kind} prompt of {prompt_tokens or SHORT_PROMPT:.0f} tokens alone takes"
            found += _text(name, "--ttft-target", ttft_s, what, alone_s)
        if tpot_s is not None and cost.knows_decodes and Role.DECODE in worker.roles:
            found += _text(name, "--tpot-target", tpot_s, "a step of one sequence alone takes", _decode_alone_s(cost))
        return found

    def _computes_prompts(self, worker: Worker) -> bool:
        return Role.PREFILL in worker.roles or not self._membership.with_role(Role.PREFILL)


def mismatch(info: WorkerInfo, settings: Settings) -> str | None:
    """What to say of a worker that was started with other settings than its gateway; None when it was not."""
    own = Settings(info.policy, *info.targets_s).flags
    differ = [f"{flag} {own[flag]} (here {value})" for flag, value in settings.flags.items() if own[flag] != value]
    if not differ:
        return None
    return (
        f"{info.ref.node_id} was started with {', '.join(differ)}: its queues and batches go by that, not by what this "
        "gateway was given. Start it with the same flags"
    )


def _prompt_alone_s(cost: StepCost, num_tokens: float) -> float:
    return cost.base_s + cost.per_prompt_token_s * num_tokens + cost.per_product_s * num_tokens**2 / 2


def _decode_alone_s(cost: StepCost) -> float:
    return cost.base_s + cost.per_decode_s


def _text(name: str, flag: str, target_s: float, what: str, alone_s: float) -> list[tuple[str, str]]:
    if alone_s <= target_s:
        return []
    text = (
        f"{name} cannot keep {flag} {_in_words(target_s)}: {what} {_in_words(alone_s)} there. Give a target well above "
        "that, twice as much leaves room for others, or use a faster device or a smaller model"
    )
    return [(flag, text)]


def _in_words(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:.3g}ms"
