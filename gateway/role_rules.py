"""What decides over roles with `--elastic`: the planner where both targets are known, else predicted waits. Pure."""

from .capacity import Targets
from .elastic import Elastic, PoolWaits
from .placement import Placement
from .planner import Planner
from .role_table import RoleRule


def role_rule(placement: Placement, ttft_target_s: float | None, tpot_target_s: float | None) -> RoleRule:
    """It keeps what it has decided and sees what there is to see in `placement`."""
    if ttft_target_s is None or tpot_target_s is None:
        elastic = Elastic(ttft_target_s)
        return lambda now, masks: elastic.update(now, PoolWaits(*placement.pool_waits(now)), masks)
    planner, targets = Planner(), Targets(ttft_target_s, tpot_target_s)
    return lambda now, masks: planner.update(now, masks, lambda at: placement.outlook(at, targets))
