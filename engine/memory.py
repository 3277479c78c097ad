"""How a card's memory is divided: pure arithmetic, with the sum as text for the start table.

    share of the card - CUDA's own - weights - activations - graphs - rings = KV pool + workspace of attention

Shares are of the card's total and given by the launcher: two processes that start together and both take what is
"free" would take it twice.
"""

from dataclasses import dataclass

from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout

# The context, the libraries' handles and the loaded kernels of one process; about 500 MiB on recent drivers.
CUDA_BYTES = 640 << 20
# What the driver and the allocator keep for one graph, beside the memory of its step, which all graphs share.
BYTES_PER_GRAPH = 16 << 20
# Contexts may share blocks, so that a batch's tokens add up to more than the pool holds; the workspace follows as far.
WORKSPACE_POOLS = 2


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one card; `share` is this process's part of it."""

    total: int
    share: float
    weights: int
    activations: int  # measured: the most that a step of the largest size takes at once
    graphs: int = 0
    rings: int = 0

    @property
    def left(self) -> int:
        used = CUDA_BYTES + self.weights + self.activations + self.graphs + self.rings
        return int(self.share * self.total) - used

    @property
    def text(self) -> str:
        parts = {
            "CUDA": CUDA_BYTES,
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "rings": self.rings,
        }
        minus = "".join(f" - {name} {_size(value)}" for name, value in parts.items() if value)
        return f"{self.share:.0%} of {_size(self.total)}{minus} = {_size(self.left)}"


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int
    note: str


def graph_bytes(num_graphs: int, step_bytes: int) -> int:
    """`step_bytes`: measured, of the largest graph's step, in whose memory the others run too."""
    return num_graphs * BYTES_PER_GRAPH + step_bytes if num_graphs else 0


def size_pool(use: MemoryUse, layout: BlockLayout, workspace_bytes_per_token: int, kv_bytes: int = 0) -> PoolSize:
    """The blocks that fit in what is left, or in `kv_bytes` of it if given.

    `workspace_bytes_per_token`: of decode attention, per token of context. Raises ConfigurationError, with the sum,
    when there is no room.
    """
    workspace = WORKSPACE_POOLS * workspace_bytes_per_token * layout.block_size
    num_blocks = max(use.left, 0) // (layout.bytes_per_block + workspace)
    wanted = kv_bytes // layout.bytes_per_block if kv_bytes else 1
    if num_blocks < wanted or wanted < 1:
        room = f"room for {_size(kv_bytes)} of KV cache" if kv_bytes else "room for a KV cache"
        raise ConfigurationError(
            f"the GPU has no {room}: {use.text}. Use a smaller model or --dtype int8, a smaller token budget, fewer "
            "workers on this card, or a larger one."
        )
    if kv_bytes:
        num_blocks = wanted
    pool = num_blocks * layout.bytes_per_block
    note = (
        f"memory: {use.text}\n"
        f"KV cache: {_size(pool)}{' as asked' if kv_bytes else ''} / {layout.bytes_per_token:,} bytes a token "
        f"= {num_blocks * layout.block_size:,} tokens; {_size(num_blocks * workspace)} for attention"
    )
    return PoolSize(num_blocks, note)


def _size(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if abs(gib) >= 1 else f"{num_bytes / (1 << 20):.0f} MiB"
