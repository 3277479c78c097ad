"""Elastic: when a worker of one pool helps the other, so that workers' roles follow the load. Pure.

For servers without both targets; with them planner.py decides.

    short     its predicted wait is more than FACTOR times the other pool's, and longer by `least_gap_s` at least
    give      short for PATIENCE_S without a break: a worker of the other pool gets the role beside its own
    take back the helped pool has not been short for the calm time, or the other pool is short for PATIENCE_S

A worker never loses its own role here, and a helper that is left alone keeps the other one too: no pool is ever
emptied. The only decode worker is not made a prefill worker: whatever it prefilled would be its own, which it does
anyway. What keeps roles from swinging with the load: changes are CHANGE_INTERVAL_S apart, a role that was given stays
STAY_S, after one was taken back none is given for REST_S, and one that is missed again within RELAPSE_S had been taken
back too early: the calm time doubles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..core.messages import NodeRef, Role

FACTOR = 2.0
PATIENCE_S = 5.0
CALM_S = 30.0
GREATEST_CALM_S = 480.0
CHANGE_INTERVAL_S = 10.0
STAY_S = 20.0
REST_S = 30.0
RELAPSE_S = 60.0
GAP_SHARE_OF_TARGET = 0.25
GAP_WITHOUT_TARGET_S = 0.5


class PoolWaits(NamedTuple):
    """How long a request that comes now will wait in each pool, in seconds."""

    prefill_s: float
    decode_s: float

    def of(self, role: Role) -> float:
        return self.prefill_s if role is Role.PREFILL else self.decode_s


class RoleChange(NamedTuple):
    """A worker is to have these roles from now on, and why, in words."""

    worker: NodeRef
    roles: tuple[Role, ...]
    reason: str


@dataclass
class _Help:
    role: Role  # that was given
    since: float


class Elastic:
    """Give it the present waits and roles often; it answers with a change now and then."""

    def __init__(self, ttft_target_s: float | None):
        self._least_gap_s = GAP_SHARE_OF_TARGET * ttft_target_s if ttft_target_s else GAP_WITHOUT_TARGET_S
        self._short: Role | None = None
        self._short_since = 0.0
        self._last_short: dict[Role, float] = {}
        self._helps: dict[NodeRef, _Help] = {}
        self._changed_at = -CHANGE_INTERVAL_S
        self._taken_back_at: dict[Role, float] = {}
        self._calm_s = dict.fromkeys(Role, CALM_S)

    def update(self, now: float, waits: PoolWaits, masks: Mapping[NodeRef, tuple[Role, ...]]) -> RoleChange | None:
        """`masks`: the roles of each worker, those that can best take more work first. The change is taken as made."""
        self._forget(masks)
        self._observe(now, waits)
        if now - self._changed_at < CHANGE_INTERVAL_S:
            return None
        change = self._take_back(now, masks) or self._give(now, waits, masks)
        if change is not None:
            self._changed_at = now
        return change

    def _forget(self, masks: Mapping[NodeRef, tuple[Role, ...]]) -> None:
        """Who left, or was given other roles by hand, helps no more."""
        self._helps = {ref: h for ref, h in self._helps.items() if h.role in masks.get(ref, ()) and len(masks[ref]) > 1}

    def _observe(self, now: float, waits: PoolWaits) -> None:
        short = next((role for role in Role if self._is_short(role, waits)), None)
        if short is not self._short:
            self._short, self._short_since = short, now
        if short is not None:
            self._last_short[short] = now

    def _is_short(self, role: Role, waits: PoolWaits) -> bool:
        wait, other = waits.of(role), waits.of(_other(role))
        return wait > FACTOR * other and wait - other >= self._least_gap_s

    def _has_been_short(self, role: Role, now: float) -> bool:
        return self._short is role and now - self._short_since >= PATIENCE_S

    def _take_back(self, now: float, masks: Mapping[NodeRef, tuple[Role, ...]]) -> RoleChange | None:
        for ref, help_ in self._helps.items():
            is_alone = not any(help_.role in mask for other, mask in masks.items() if other != ref)
            if is_alone or now - help_.since < STAY_S:
                continue
            reason = self._why_back(help_, now)
            if reason:
                del self._helps[ref]
                self._taken_back_at[help_.role] = now
                return RoleChange(ref, tuple(role for role in masks[ref] if role is not help_.role), reason)
        return None

    def _why_back(self, help_: _Help, now: float) -> str:
        other = _other(help_.role)
        if self._has_been_short(other, now):
            return f"the {other} pool has been the short one for {PATIENCE_S:g} s"
        calm = self._calm_s[help_.role]
        if now - max(self._last_short[help_.role], help_.since) >= calm:
            return f"the {help_.role} pool has not been short for {calm:g} s"
        return ""

    def _give(self, now: float, waits: PoolWaits, masks: Mapping[NodeRef, tuple[Role, ...]]) -> RoleChange | None:
        role = self._short
        rested = all(now - at >= REST_S for at in self._taken_back_at.values())
        if role is None or not rested or not self._has_been_short(role, now):
            return None
        if any(help_.role is not role for help_ in self._helps.values()):
            return None  # it is to be taken back first
        ref = _helper(role, masks)
        if ref is None:
            return None
        if now - self._taken_back_at.get(role, -RELAPSE_S) < RELAPSE_S:
            self._calm_s[role] = min(2 * self._calm_s[role], GREATEST_CALM_S)
        else:
            self._calm_s[role] = CALM_S
        self._helps[ref] = _Help(role, now)
        return RoleChange(
            ref,
            tuple(Role),
            f"the {role} pool's predicted wait of {waits.of(role):.2f} s has been over {FACTOR:g} times the "
            f"{_other(role)} pool's ({waits.of(_other(role)):.2f} s) for {PATIENCE_S:g} s",
        )


def _helper(role: Role, masks: Mapping[NodeRef, tuple[Role, ...]]) -> NodeRef | None:
    """Who is to get the role, when somebody has it already."""
    num_with = {role: sum(role in mask for mask in masks.values()) for role in Role}
    if not num_with[role]:
        return None
    # A decode worker can always compute the prompts it decodes itself: its prefill role is for others.
    if role is Role.PREFILL and num_with[Role.DECODE] < 2:
        return None
    return next((ref for ref, mask in masks.items() if mask == (_other(role),)), None)


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
