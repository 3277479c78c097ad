"""The division of a card's memory, by literals."""

import pytest

from baton.core.errors import ConfigurationError
from baton.core.layout import BlockLayout
from baton.engine.memory import BYTES_PER_GRAPH, CUDA_BYTES, MemoryUse, graph_bytes, size_pool

GIB = 1 << 30
# Llama-3.1-8B in bf16: 128 KiB a token.
LAYOUT = BlockLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


def use(**changes: float) -> MemoryUse:
    values = {"total": 140 * GIB, "share": 0.9, "weights": 15 * GIB, "activations": 2 * GIB, "graphs": GIB // 2}
    return MemoryUse(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_left_is_the_share_without_everything_else() -> None:
    assert use().left == 126 * GIB - CUDA_BYTES - 17 * GIB - GIB // 2
    assert use(rings=3 * GIB).left == use().left - 3 * GIB


def test_all_that_is_left_becomes_blocks_and_their_workspace() -> None:
    per_block = 16 * (128 * 1024 + 2 * 64)  # 64 bytes of workspace a token, for twice the pool's tokens
    size = size_pool(use(), LAYOUT, workspace_bytes_per_token=64)
    assert size.num_blocks == use().left // per_block
    assert size.num_blocks * per_block <= use().left < (size.num_blocks + 1) * per_block
    first, second = size.note.splitlines()
    assert first == (
        "memory: 90% of 140.0 GiB - CUDA 640 MiB - weights 15.0 GiB - activations 2.0 GiB - graphs 512 MiB = 107.9 GiB"
    )
    assert second == "KV cache: 107.8 GiB / 131,072 bytes a token = 882,848 tokens; 108 MiB for attention"


def test_a_size_that_was_asked_for_is_taken_or_refused() -> None:
    size = size_pool(use(), LAYOUT, 64, kv_bytes=10 * GIB)
    assert size.num_blocks == 10 * GIB // (2 << 20)
    assert "10.0 GiB as asked" in size.note
    with pytest.raises(ConfigurationError, match=r"no room for 120\.0 GiB of KV cache: 90% of 140\.0 GiB - CUDA"):
        size_pool(use(), LAYOUT, 64, kv_bytes=120 * GIB)
    with pytest.raises(ConfigurationError, match="no room for 1 MiB of KV cache"):
        size_pool(use(), LAYOUT, 64, kv_bytes=1 << 20)  # less than a block


@pytest.mark.parametrize("weights", [124 * GIB, 125.4 * GIB, 200 * GIB])
def test_no_room_is_said_with_the_sum(weights: float) -> None:
    with pytest.raises(ConfigurationError, match=r"no room for a KV cache: 90% of 140\.0 GiB - CUDA 640 MiB - weights"):
        size_pool(use(weights=int(weights)), LAYOUT, 64)


def test_graphs_share_the_memory_of_the_largest_step() -> None:
    assert graph_bytes(0, 10**9) == 0
    assert graph_bytes(35, 10**9) == 35 * BYTES_PER_GRAPH + 10**9
