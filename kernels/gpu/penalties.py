"""Changes to the logits before sampling: penalties for tokens that occurred, a sparse bias, and a mask.

What is sparse comes as entries (row, token, number), so its cost is that of the tokens it is about.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape

_BLOCK = 256  # entries a program
_MASK_BLOCK = 1024  # tokens a program
_INTS = (torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64)


@triton.jit(do_not_specialize=["num_rows", "n"])  # they change from step to step
def _penalise(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart; changed
    rows_ptr,  # [n]
    token_ids_ptr,  # [n]
    counts_ptr,  # [n]
    repetition_ptr,  # [S]
    presence_ptr,
    frequency_ptr,
    logits_stride,
    num_rows,
    vocab_size,
    n,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + index, mask=index < n, other=-1).to(tl.int64)
    token = tl.load(token_ids_ptr + index, mask=index < n, other=-1).to(tl.int64)
    count = tl.load(counts_ptr + index, mask=index < n, other=0).to(tl.float64)
    valid = (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocab_size)
    repetition = tl.load(repetition_ptr + row, mask=valid, other=1.0).to(tl.float64)
    presence = tl.load(presence_ptr + row, mask=valid, other=0.0).to(tl.float64)
    frequency = tl.load(frequency_ptr + row, mask=valid, other=0.0).to(tl.float64)
    logit = tl.load(logits_ptr + row * logits_stride + token, mask=valid, other=0.0).to(tl.float64)
    logit = tl.where(logit > 0.0, logit / repetition, logit * repetition)
    logit -= frequency * count + tl.where(count > 0.0, presence, 0.0)
    tl.store(logits_ptr + row * logits_stride + token, logit.to(tl.float32), mask=valid)


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


@triton.jit
def _keep_allowed(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart; changed
    rows_ptr,  # [m]
    allowed_ptr,  # [m, num_words] int32
    logits_stride,
    vocab_size,
    num_words,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(1)).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    word = tl.load(allowed_ptr + tl.program_id(1).to(tl.int64) * num_words + token // 32, mask=mask, other=-1)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=mask & is_forbidden)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise `logits[rows[i], token_ids[i]]` in place, for `[n]` entries, each (row, token) once.

    `counts[i]` says how often the token is in the row's output; 0: it is in the prompt alone. The logit is divided by
    `repetition` `[S]` of its row if positive, else multiplied by it (Keskar et al., 2019: CTRL); a token of the output
    then loses `frequency` times its count, and `presence` once. Entries outside of `logits` `[S, vocab_size]` fp32 are
    passed over.
    """
    _check_entries(logits, rows=rows, token_ids=token_ids, counts=counts)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        require_tensor(name, tensor, (len(logits),), *_FLOATS)
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    if len(rows) > 0:
        _penalise[(triton.cdiv(len(rows), _BLOCK),)](
            logits,
            rows,
            token_ids,
            counts,
            repetition,
            presence,
            frequency,
            logits.stride(0),
            len(logits),
            logits.shape[1],
            len(rows),
            BLOCK=_BLOCK,
            **compile_options(4, 1),
        )


def keep_allowed(logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
    """-inf in place for every token of `logits[rows[i]]` whose bit in `allowed[i]` is 0; rows come once.

    `rows` is `[m]`, `allowed` `[m, ceil(vocab_size / 32)]` int32: bit `t % 32` of word `t // 32`, counted from the
    lowest, is token t's. `rows` must lie within `logits` `[S, vocab_size]` fp32.
    """
    _check_entries(logits, rows=rows)
    vocab_size = logits.shape[1]
    require_tensor("allowed", allowed, (len(rows), triton.cdiv(vocab_size, 32)), torch.int32)
    require(allowed.is_contiguous(), "allowed is not contiguous")
    if len(rows) > 0:
        _keep_allowed[(triton.cdiv(vocab_size, _MASK_BLOCK), len(rows))](
            logits,
            rows,
            allowed,
            logits.stride(0),
            vocab_size,
            allowed.shape[1],
            BLOCK=_MASK_BLOCK,
            **compile_options(4, 1),
        )


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """`logits[rows[i], token_ids[i]] += values[i]` in place, for `[n]` entries; -inf suppresses a token.

    No (row, token) may come twice with values that differ: which one counts is not defined. Entries outside of
    `logits` `[S, vocab_size]` fp32 are passed over.
    """
    _check_entries(logits, rows=rows, token_ids=token_ids)
    n = len(rows)
    require_tensor("values", values, (n,), *_FLOATS)
    require(values.is_contiguous(), "values is not contiguous")
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


def _check_entries(logits: Tensor, **entries: Tensor) -> None:
    """Raises ValueError unless these are logits, and integers of which all have one length."""
    require_tensor("logits", logits, (None, None), torch.float32)
    require(logits.stride(1) == 1, "logits' last dimension is not contiguous")
    length = len(entries["rows"])
    for name, tensor in entries.items():
        require_tensor(name, tensor, (length,), *_INTS)
        require(tensor.is_contiguous(), f"{name} is not contiguous")


def penalties_cost(num_entries: int) -> OpCost:
    """Each entry's row, token id and count (8 bytes each) and its logit, read and written."""
    return OpCost(num_entries * (3 * 8 + 2 * 4), 6 * num_entries)


def mask_cost(num_rows: int, vocab_size: int) -> OpCost:
    """A bit for each logit, and at worst each logit written."""
    return OpCost(num_rows * (vocab_size // 8 + 4 * vocab_size), 2 * num_rows * vocab_size)


def bias_cost(num_entries: int) -> OpCost:
    """Each entry's row, token id and value (8 bytes each) and its logit, read and written."""
    return OpCost(num_entries * (3 * 8 + 2 * 4), num_entries)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The three launches for the model's vocabulary; none of them reads in a row, so none can be wide."""
    aligned = ("logits_stride", "vocab_size") if shape.vocab_size % 16 == 0 else ()
    entries = {"logits_ptr": "*fp32", "rows_ptr": "*i64", "token_ids_ptr": "*i64"}
    rules = dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp64")
    sizes = dict.fromkeys(("logits_stride", "num_rows", "vocab_size", "n", "num_words"), "i32")
    launches = (
        ("penalties", _penalise, {**entries, "counts_ptr": "*i64", **rules}, _BLOCK),
        ("logit bias", _add_bias, {**entries, "values_ptr": "*fp64"}, _BLOCK),
        ("token mask", _keep_allowed, {"logits_ptr": "*fp32", "rows_ptr": "*i64", "allowed_ptr": "*i32"}, _MASK_BLOCK),
    )
    specs = []
    for name, function, pointers, block in launches:
        taken = {n: kind for n, kind in {**pointers, **sizes}.items() if n in function.arg_names}
        fitting = tuple(n for n in aligned if n in taken)
        specs.append(KernelSpec(name, function, taken, {"BLOCK": block}, num_warps=4, num_stages=1, aligned=fitting))
    return specs
