"""How one step is shared between prompts that were admitted: the most urgent first. Pure.

Waiting requests are ordered by core/queueing.py. When one is admitted its rank is fixed, with what ageing has
done for it until then.
"""

from collections.abc import Sequence

from ..core.queueing import Rank
from ..engine.chunk_planning import plan_chunks
from .packing import pack_chunks

LEAST_SHARE = 8  # the oldest interactive prompt gets at least 1/8 of the budget


def share_budget(
    remaining: list[int], ranks: Sequence[Rank], token_budget: int, chunk_size: int, *, packs: bool = False
) -> list[int]:
    """Tokens of each prompt in the next step. `remaining` and `ranks` are in order of admission.

    The most urgent are planned as if they were alone, the next ones get what is left, and so on. So the most urgent
    are not held up by others, but that the oldest interactive prompt always moves, by a share of the budget if by
    nothing else: whoever was admitted is the oldest some day, and ends. Batch gets what is left and no more.

    `packs`: those of one rank are packed by length (packing.py), where they have the whole budget.
    """
    counts = _share_by_rank(remaining, ranks, token_budget, chunk_size, packs)
    oldest = next((i for i, left in enumerate(remaining) if left and not ranks[i].is_batch), None)
    if oldest is None or ranks[oldest] == min(ranks):
        return counts
    least = min(max(token_budget // LEAST_SHARE, 1), remaining[oldest], chunk_size, token_budget)
    if counts[oldest] >= least:
        return counts
    others = [0 if i == oldest else left for i, left in enumerate(remaining)]
    counts = _share_by_rank(others, ranks, token_budget - least, chunk_size, packs)
    counts[oldest] = least
    return counts


def _share_by_rank(
    remaining: list[int], ranks: Sequence[Rank], token_budget: int, chunk_size: int, packs: bool
) -> list[int]:
    counts, left = [0] * len(remaining), token_budget
    for rank in sorted(set(ranks)):
        members = [i for i, its in enumerate(ranks) if its == rank]
        share = pack_chunks if packs and left == token_budget else plan_chunks
        for i, count in zip(members, share([remaining[i] for i in members], left, chunk_size), strict=True):
            counts[i] = count
            left -= count
    return counts
