"""Norm, RoPE and store under the interpreter, against their definition, over the whole cache."""

from typing import Any

import pytest
import torch

from baton.kernels import reference
from baton.kernels.gpu.rope_store import norm_rope_store, rope_store_config, rope_store_cost

EPS = 1e-6
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3}
NAN = float("nan")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def arguments(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, norm: bool
) -> dict[str, Any]:
    """Tokens with gaps between them, as a view of a wider projection; layer 1 of a pool of three layers, NaN."""
    projection = torch.full((num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + 8), NAN, dtype=dtype)
    heads = projection[:, :-8].view(num_tokens, -1, head_dim)
    heads.copy_(random(*heads.shape))
    pool = torch.full((num_tokens + 2, 3, 2, num_kv_heads, block_size, head_dim), NAN, dtype=dtype)
    angles = random(num_tokens, head_dim // 2) * 3
    slots = [(num_tokens + 1 - token) * block_size + token % block_size for token in range(num_tokens)]
    return {
        "heads": heads,
        "num_heads": num_heads,
        "q_norm_weight": random(head_dim) if norm else None,
        "k_norm_weight": random(head_dim + 1)[1:] if norm else None,
        "eps": EPS,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "kv_layer": pool[:, 1],
        "slot_mapping": torch.tensor(slots),
    }


def expected(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads and the whole pool after the definition ran in fp32."""
    pool = given["kv_layer"]._base.float()
    heads = given["heads"].float()
    slots = given["slot_mapping"].tolist()
    reference.norm_rope_store(**{**given, "heads": heads, "kv_layer": pool[:, 1], "slot_mapping": slots})
    return heads, pool


def check(given: dict[str, Any]) -> None:
    heads, pool = expected(given)
    projection, num_heads = given["heads"]._base.clone(), given["num_heads"]
    norm_rope_store(**given)
    tolerance = {"rtol": TOLERANCES[heads_dtype(given)], "atol": TOLERANCES[heads_dtype(given)] / 10}
    torch.testing.assert_close(given["heads"][:, :num_heads].float(), heads[:, :num_heads], **tolerance)
    torch.testing.assert_close(given["kv_layer"]._base.float(), pool, equal_nan=True, **tolerance)
    # values bit for bit; keys and values stay as they were in the projection, and so does what lies between tokens
    assert torch.equal(given["kv_layer"]._base.float()[:, 1, 1].nan_to_num(7), pool[:, 1, 1].nan_to_num(7))
    start = num_heads * heads.shape[2]
    assert torch.equal(given["heads"]._base[:, start:].nan_to_num(7), projection[:, start:].nan_to_num(7))


def heads_dtype(given: dict[str, Any]) -> torch.dtype:
    return given["heads"].dtype


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 112, 128, 160, 256])
def test_head_sizes(head_dim: int, norm: bool) -> None:
    check(arguments(3, 4, 2, head_dim, 4, torch.float32, norm))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (10, 2), (7, 1), (9, 3), (16, 1), (40, 8)])
def test_groups(num_heads: int, num_kv_heads: int) -> None:
    check(arguments(2, num_heads, num_kv_heads, 64, 8, torch.float16, norm=True))


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    check(arguments(5, 2, 1, 16, block_size, dtype, norm=False))


def test_by_hand() -> None:
    """A quarter turn of one query and one key: (first, second) becomes (-second, first)."""
    heads = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]])
    cos, sin, kv_layer = torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(2, 2, 1, 2, 4)
    norm_rope_store(heads, 1, None, None, EPS, cos, sin, kv_layer, torch.tensor([3]))
    assert heads[0].tolist() == [[-3.0, -4.0, 1.0, 2.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]
    assert kv_layer[1, :, 0, 1].tolist() == [[-7.0, -8.0, 5.0, 6.0], [9.0, 10.0, 11.0, 12.0]]
    assert kv_layer.count_nonzero() == 8


def test_a_token_of_padding_is_not_stored() -> None:
    given = arguments(4, 2, 1, 16, 4, torch.float32, norm=True)
    given["slot_mapping"][1] = -1
    given["slot_mapping"][3] = -1
    check(given)
    assert given["kv_layer"].isnan().sum() == given["kv_layer"].numel() - 2 * 2 * 16


def test_a_value_of_infinity_stays_one() -> None:
    given = arguments(2, 2, 1, 16, 4, torch.float32, norm=False)
    given["heads"][1, 3, 2] = float("inf")
    check(given)
    slot = given["slot_mapping"][1].item()
    assert given["kv_layer"][slot // 4, 1, 0, slot % 4].isinf().sum() == 1


def test_values_are_copied_in_bfloat16() -> None:
    given = arguments(3, 4, 2, 64, 4, torch.bfloat16, norm=True)
    values = given["heads"][:, 6:].clone()
    norm_rope_store(**given)
    stored = [given["kv_layer"][slot // 4, 1, :, slot % 4] for slot in given["slot_mapping"].tolist()]
    assert torch.equal(torch.stack(stored), values)


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    together = arguments(6, 5, 1, 80, 4, torch.float32, norm=True)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    per_token = ("heads", "cos", "sin", "slot_mapping")
    permuted = {**together, **{name: together[name][order] for name in per_token}}
    permuted["kv_layer"] = torch.zeros_like(together["kv_layer"])
    alone = {**together, **{name: together[name][2:3].clone() for name in per_token}}
    alone["kv_layer"] = torch.zeros_like(together["kv_layer"])
    for given in (permuted, alone, together):
        norm_rope_store(**given)
    slot = together["slot_mapping"][2].item()
    for other, row in ((permuted, 3), (alone, 0)):
        assert torch.equal(other["heads"][row], together["heads"][2])
        assert torch.equal(
            other["kv_layer"][slot // 4, :, :, slot % 4], together["kv_layer"][slot // 4, :, :, slot % 4]
        )
    assert torch.equal(permuted["heads"], together["heads"][order])


def test_blocks_and_tokens_past_two_to_the_31_elements(sparse_buffer) -> None:
    """Tokens and blocks lie 2^30 elements apart, so the third one's offset does not fit 32 bits."""
    stride = (1 << 30) + 64
    given = arguments(3, 2, 1, 16, 4, torch.float16, norm=True)
    far = dict(given)
    far["heads"] = sparse_buffer(2 * stride + 4 * 16, torch.float16).as_strided((3, 4, 16), (stride, 16, 1))
    far["heads"].copy_(given["heads"])
    near_layer = torch.zeros(3, 2, 1, 4, 16, dtype=torch.float16)
    far_layer = sparse_buffer(2 * stride + 128, torch.float16).as_strided((3, 2, 1, 4, 16), (stride, 64, 64, 16, 1))
    slots = torch.tensor([11, 8, 1])
    norm_rope_store(**{**given, "kv_layer": near_layer, "slot_mapping": slots})
    norm_rope_store(**{**far, "kv_layer": far_layer, "slot_mapping": slots})
    assert near_layer[2].abs().sum() > 0
    assert torch.equal(far_layer, near_layer)
    assert torch.equal(far["heads"], given["heads"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "4 heads cannot be"),
        ({"num_heads": 3}, "4 heads cannot be"),
        ({"heads": torch.ones(3, 4, 15)}, "15 elements"),
        ({"cos": torch.ones(3, 7)}, "cos has shape"),
        ({"sin": torch.ones(3, 8).half()}, "sin is torch.float16"),
        ({"k_norm_weight": None}, "come together"),
        ({"q_norm_weight": torch.ones(8)}, "q_norm_weight has shape"),
        ({"kv_layer": torch.ones(5, 2, 2, 4, 16)}, "kv_layer has shape"),
        ({"kv_layer": torch.ones(5, 2, 1, 4, 16).half()}, "kv_layer is torch.float16"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping is torch.int32"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping has shape"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], message: str) -> None:
    given = arguments(3, 2, 1, 16, 4, torch.float32, norm=True)
    with pytest.raises(ValueError, match=message):
        norm_rope_store(**{**given, **change})


def test_configuration_and_cost_by_hand() -> None:
    assert rope_store_config(32, 8, 128) == {"TILE_HEADS": 16, "TILE_HALF": 64, "num_warps": 4}
    assert rope_store_config(9, 3, 64) == {"TILE_HEADS": 16, "TILE_HALF": 32, "num_warps": 2}
    assert rope_store_config(1, 1, 256) == {"TILE_HEADS": 4, "TILE_HALF": 128, "num_warps": 2}
    # one token of 3 heads of 16 bfloat16 values in and out, 8 + 8 angles of 4 bytes, its slot
    assert rope_store_cost(1, 1, 1, 16, 2).bytes == 2 * 3 * 32 + 64 + 8
