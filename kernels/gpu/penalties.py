"""Changes to the logits before sampling: penalties for tokens that occurred, and a sparse bias."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape

_BLOCK = 256  # token ids a program
_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)


@triton.jit(do_not_specialize=["ids_stride", "num_columns"])
def _count(  # type: ignore[no-untyped-def]
    token_ids_ptr,  # [S, L], rows ids_stride apart
    num_prompt_tokens_ptr,
    num_tokens_ptr,
    counts_ptr,  # [S, vocab_size] int32: bit 0 is set for a token of the prompt, the rest counts the output
    ids_stride,
    num_columns,  # L
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_tokens = tl.minimum(tl.load(num_tokens_ptr + row), num_columns)
    if tl.program_id(0) * BLOCK < num_tokens:
        token = tl.load(token_ids_ptr + row * ids_stride + index, mask=index < num_tokens, other=-1).to(tl.int64)
        valid = (token >= 0) & (token < vocab_size)
        is_output = index >= tl.load(num_prompt_tokens_ptr + row)
        slot = counts_ptr + row * vocab_size + token
        tl.atomic_or(slot, 1, mask=valid & (is_output == 0), sem="relaxed")
        tl.atomic_add(slot, 2, mask=valid & is_output, sem="relaxed")


@triton.jit(do_not_specialize=["ids_stride", "num_columns"])
def _penalise(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart; changed
    token_ids_ptr,  # [S, L], rows ids_stride apart
    num_tokens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,  # [S, vocab_size] int32; left as zeros
    logits_stride,
    ids_stride,
    num_columns,  # L
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The occurrence that finds a token's count takes it and penalises the token, so each token is changed once.

    Which occurrence that is depends on timing; what it computes does not.
    """
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_tokens = tl.minimum(tl.load(num_tokens_ptr + row), num_columns)
    if tl.program_id(0) * BLOCK < num_tokens:
        token = tl.load(token_ids_ptr + row * ids_stride + index, mask=index < num_tokens, other=-1).to(tl.int64)
        valid = (token >= 0) & (token < vocab_size)
        slot = counts_ptr + row * vocab_size + token
        taken = tl.atomic_xchg(slot, tl.zeros([BLOCK], tl.int32), mask=valid, sem="relaxed")
        mine = valid & (taken != 0)
        repetition = tl.load(repetition_ptr + row).to(tl.float64)
        presence = tl.load(presence_ptr + row).to(tl.float64)
        frequency = tl.load(frequency_ptr + row).to(tl.float64)
        logit = tl.load(logits_ptr + row * logits_stride + token, mask=mine, other=0.0).to(tl.float64)
        count = taken >> 1
        logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
        logit -= frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
        tl.store(logits_ptr + row * logits_stride + token, logit.to(tl.float32), mask=mine)


@triton.jit(do_not_specialize=["num_rows", "n"])  # they change from step to step
def _add_bias(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart; changed
    rows_ptr,  # [n]
    token_ids_ptr,  # [n]
    values_ptr,  # [n]
    logits_stride,
    num_rows,
    vocab_size,
    n,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + index, mask=index < n, other=-1).to(tl.int64)
    token = tl.load(token_ids_ptr + index, mask=index < n, other=-1).to(tl.int64)
    value = tl.load(values_ptr + index, mask=index < n, other=0.0).to(tl.float64)
    valid = (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocab_size)
    logit = tl.load(logits_ptr + row * logits_stride + token, mask=valid, other=0.0).to(tl.float64)
    tl.store(logits_ptr + row * logits_stride + token, (logit + value).to(tl.float32), mask=valid)


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Penalise in place the tokens that occur in each row's `token_ids[:num_tokens]`; `logits` `[S, vocab_size]` fp32.

    A logit of any token there is divided by `repetition` `[S]` if positive, else multiplied by it (Keskar et al., 2019:
    CTRL); a token of the output, from `num_prompt_tokens` on, then loses `frequency` times its count there, and
    `presence` once. `token_ids` is `[S, L]`; ids outside the vocabulary are passed over. `counts` is room to count in,
    `[S or more, vocab_size]` int32, all zeros before and after; made if it is not given.
    """
    require_tensor("logits", logits, (None, None), torch.float32)
    require(logits.stride(1) == 1, "logits' last dimension is not contiguous")
    num_rows, vocab_size = logits.shape
    require_tensor("token_ids", token_ids, (num_rows, None), *_INTS)
    require(token_ids.stride(1) == 1, "token_ids' last dimension is not contiguous")
    for name, tensor in (("num_prompt_tokens", num_prompt_tokens), ("num_tokens", num_tokens)):
        require_tensor(name, tensor, (num_rows,), *_INTS)
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        require_tensor(name, tensor, (num_rows,), *_FLOATS)
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    if counts is None:
        counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    require_tensor("counts", counts, (None, vocab_size), torch.int32)
    require(len(counts) >= num_rows and counts.is_contiguous(), "counts has too few rows or is not contiguous")
    if num_rows == 0 or token_ids.shape[1] == 0:
        return
    grid = (triton.cdiv(token_ids.shape[1], _BLOCK), num_rows)
    sizes = (token_ids.stride(0), token_ids.shape[1], vocab_size)
    options = {"BLOCK": _BLOCK, **compile_options(4, 1)}
    _count[grid](token_ids, num_prompt_tokens, num_tokens, counts, *sizes, **options)
    rules = (repetition, presence, frequency)
    _penalise[grid](logits, token_ids, num_tokens, *rules, counts, logits.stride(0), *sizes, **options)


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """`logits[rows[i], token_ids[i]] += values[i]` in place, for `[n]` entries; -inf suppresses a token.

    No (row, token) may come twice with values that differ: which one counts is not defined. Entries outside of
    `logits` `[S, vocab_size]` fp32 are passed over.
    """
    require_tensor("logits", logits, (None, None), torch.float32)
    require(logits.stride(1) == 1, "logits' last dimension is not contiguous")
    n = len(rows)
    require_tensor("rows", rows, (n,), *_INTS)
    require_tensor("token_ids", token_ids, (n,), *_INTS)
    require_tensor("values", values, (n,), *_FLOATS)
    for name, tensor in (("rows", rows), ("token_ids", token_ids), ("values", values)):
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    if n > 0:
        _add_bias[(triton.cdiv(n, _BLOCK),)](
            logits,
            rows,
            token_ids,
            values,
            logits.stride(0),
            len(logits),
            logits.shape[1],
            n,
            BLOCK=_BLOCK,
            **compile_options(4, 1),
        )


def penalties_cost(num_tokens: int) -> OpCost:
    """`num_tokens` ids over all rows, each read twice; its count read and written twice, its logit once."""
    return OpCost(num_tokens * (2 * 4 + 4 * 4 + 2 * 4), 6 * num_tokens)


def bias_cost(num_entries: int) -> OpCost:
    """Each entry's row, token id and value (8 bytes each) and its logit, read and written."""
    return OpCost(num_entries * (3 * 8 + 2 * 4), num_entries)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The three launches for the model's vocabulary; none of them reads in a row, so none can be wide."""
    aligned = ("logits_stride", "vocab_size") if shape.vocab_size % 16 == 0 else ()
    tokens = {"token_ids_ptr": "*i32", "num_prompt_tokens_ptr": "*i32", "num_tokens_ptr": "*i32", "counts_ptr": "*i32"}
    rules = dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp64")
    entries = {"rows_ptr": "*i64", "token_ids_ptr": "*i64", "values_ptr": "*fp64"}
    sizes = dict.fromkeys(("logits_stride", "ids_stride", "num_columns", "num_rows", "vocab_size", "n"), "i32")
    launches = (
        ("penalties, count", _count, tokens),
        ("penalties", _penalise, {"logits_ptr": "*fp32", **tokens, **rules}),
        ("logit bias", _add_bias, {"logits_ptr": "*fp32", **entries}),
    )
    specs = []
    for name, function, pointers in launches:
        taken = {n: kind for n, kind in {**pointers, **sizes}.items() if n in function.arg_names}
        fitting = tuple(n for n in aligned if n in taken)
        specs.append(KernelSpec(name, function, taken, {"BLOCK": _BLOCK}, num_warps=4, num_stages=1, aligned=fitting))
    return specs
