"""Case: one op at one size, what it must move and compute, and how to run it."""

from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.gpu.cost import OpCost

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """`make` allocates the op's operands and returns what runs it; each call gives operands of its own, so that several
    runs in turn find nothing in a cache that a model's next layer would not find there either.
    """

    op: str  # "decode attention"
    size: str  # "8 x 32,768"
    cost: OpCost
    make: Callable[[], Run]
    rate: str  # of DeviceLimits.flops_per_second: the arithmetic it uses
    goal: float = 0.0  # the fraction of the measured limit that is wanted; 0: none was set
    goal_flops: float = 0.0  # or operations a second
