"""Log-probabilities of logits: of one given token per row, and of the likeliest ones.

    _scan    highest logit, sum of exponentials and likeliest tokens of each piece of a row   one pass
    _join    the pieces of a row: the log of its sum, and the likeliest tokens of all pieces

Rows are cut as for sampling (sampling_tensors.py). A token is found as the highest of 64-bit keys: its logit's order,
then the lowest id. So equal logits come in the order of their ids, and one reduction finds both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape
from .ordered_keys import float_of_key, ordered_key
from .sampling_tensors import PIECE, VocabularyCut

__all__ = ["MAX_TOP", "kernel_specs", "logprobs_cost", "token_logprobs"]

MAX_TOP = 32  # tokens a row may ask for
_WARPS = 4
_LEAST_LOGPROB = tl.constexpr(-9999.0)  # the CPU's
_NO_KEY = tl.constexpr(-(2**63))
_LOW_WORD = tl.constexpr(0xFFFFFFFF)
_INTS = (torch.int32, torch.int64)


@triton.jit
def _token_key(x, token):  # type: ignore[no-untyped-def]
    """An int64 per logit that compares as (logit, -token) does."""
    return (ordered_key(x).to(tl.int64) << 32) | (token.to(tl.int64) ^ _LOW_WORD)


@triton.jit
def _finite(x):  # type: ignore[no-untyped-def]
    """0 for an infinity: the difference of two is no number."""
    return tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)


@triton.jit
def _told(logit, total):  # type: ignore[no-untyped-def]
    """The log-probability, between the least and 0; the least also where the model's logits are no numbers."""
    logprob = tl.where(logit < float("inf"), logit, float("-inf")) - total
    return tl.where(logprob >= _LEAST_LOGPROB, tl.where(logprob > 0.0, 0.0, logprob), _LEAST_LOGPROB)


@triton.jit(do_not_specialize=["num_top"])
def _scan(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart
    rows_ptr,  # [n]
    piece_best_ptr,  # out: [n, num_pieces] fp32
    piece_sum_ptr,  # out: [n, num_pieces] fp32, of exp(x - the piece's best, if finite)
    piece_keys_ptr,  # out: [n, num_pieces, num_top] int64, falling
    logits_stride,
    vocab_size,
    num_pieces,
    num_top,
    PIECE: tl.constexpr,
):
    piece = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    token = piece * PIECE + tl.arange(0, PIECE)
    row = tl.load(rows_ptr + index).to(tl.int64)
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    best = tl.max(x, 0)
    total = tl.sum(tl.exp(x - _finite(best)), 0)
    tl.store(piece_best_ptr + index * num_pieces + piece, best)
    tl.store(piece_sum_ptr + index * num_pieces + piece, total)
    keys = tl.where(token < vocab_size, _token_key(x, token), _NO_KEY)
    for place in range(num_top):
        highest = tl.max(keys, 0)
        tl.store(piece_keys_ptr + (index * num_pieces + piece) * num_top + place, highest)
        keys = tl.where(keys == highest, _NO_KEY, keys)


@triton.jit(do_not_specialize=["num_top"])
def _join(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart
    rows_ptr,  # [n]
    token_ids_ptr,  # [S]
    piece_best_ptr,  # [n, num_pieces] fp32
    piece_sum_ptr,  # [n, num_pieces] fp32
    piece_keys_ptr,  # [n, num_pieces, num_top] int64
    chosen_ptr,  # out: [n] fp32
    top_ptr,  # out: [n, num_top] fp32
    top_ids_ptr,  # out: [n, num_top] int64
    logits_stride,
    vocab_size,
    num_pieces,
    num_top,
    PIECES: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    mask = piece < num_pieces
    piece_best = tl.load(piece_best_ptr + index * num_pieces + piece, mask=mask, other=float("-inf"))
    piece_sum = tl.load(piece_sum_ptr + index * num_pieces + piece, mask=mask, other=0.0)
    best = tl.max(piece_best, 0)
    shift = tl.where(piece_best > float("-inf"), _finite(piece_best) - _finite(best), float("-inf"))
    total = tl.sum(piece_sum * tl.exp(shift), 0)
    total = _finite(best) + tl.log(tl.maximum(total, 1.0e-37))  # all of them -inf: so is each logit
    row = tl.load(rows_ptr + index).to(tl.int64)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    is_token = (token >= 0) & (token < vocab_size)
    chosen = tl.load(logits_ptr + row * logits_stride + token, mask=is_token, other=float("-inf"))
    tl.store(chosen_ptr + index, _told(chosen, total))
    candidate = tl.arange(0, CANDIDATES)
    num_candidates = num_pieces * num_top
    keys_row = piece_keys_ptr + index * num_candidates
    keys = tl.load(keys_row + candidate, mask=candidate < num_candidates, other=_NO_KEY)
    for place in range(num_top):
        highest = tl.max(keys, 0)
        logit = float_of_key((highest >> 32).to(tl.int32))
        tl.store(top_ptr + index * num_top + place, _told(logit, total))
        tl.store(top_ids_ptr + index * num_top + place, (highest & _LOW_WORD) ^ _LOW_WORD)
        keys = tl.where(keys == highest, _NO_KEY, keys)


def token_logprobs(logits: Tensor, rows: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of `logits[rows[i]]` at `token_ids[rows[i]]`, and the `num_top` highest of each row, for `[n]` rows.

    `logits` is `[S, vocab_size]` fp32, `token_ids` `[S]`; `rows` must lie within them. Returns `[n]` float32,
    `[n, num_top]` float32 in falling order, and their ids int64, lowest first among equals. All lie between -9999 and
    0; a token id outside of the vocabulary has -9999. `num_top` is at most MAX_TOP and the vocabulary.
    """
    require_tensor("logits", logits, (None, None), torch.float32)
    require(logits.stride(1) == 1, "logits' last dimension is not contiguous")
    num_rows, vocab_size = logits.shape
    n = len(rows)
    for name, tensor, length in (("rows", rows, n), ("token_ids", token_ids, num_rows)):
        require_tensor(name, tensor, (length,), *_INTS)
        require(tensor.is_contiguous(), f"{name} is not contiguous")
    require(0 <= num_top <= min(MAX_TOP, vocab_size), f"num_top is {num_top}, at most {MAX_TOP} of {vocab_size} can be")
    device, cut = logits.device, VocabularyCut(vocab_size)
    chosen = torch.empty(n, dtype=torch.float32, device=device)
    top = torch.empty((n, num_top), dtype=torch.float32, device=device)
    top_ids = torch.empty((n, num_top), dtype=torch.int64, device=device)
    if n == 0:
        return chosen, top, top_ids
    piece_best, piece_sum = torch.empty((2, n, cut.num_pieces), dtype=torch.float32, device=device)
    piece_keys = torch.empty((n, cut.num_pieces, num_top), dtype=torch.int64, device=device)
    pieces = (piece_best, piece_sum, piece_keys)
    sizes = (logits.stride(0), vocab_size, cut.num_pieces, num_top)
    options = compile_options(_WARPS, 1)
    _scan[(cut.num_pieces, n)](logits, rows, *pieces, *sizes, PIECE=PIECE, **options)
    _join[(n,)](
        logits,
        rows,
        token_ids,
        *pieces,
        chosen,
        top,
        top_ids,
        *sizes,
        PIECES=cut.padded_pieces,
        CANDIDATES=cut.padded_pieces * MAX_TOP,
        **options,
    )
    return chosen, top, top_ids


def logprobs_cost(num_rows: int, vocab_size: int, num_top: int) -> OpCost:
    """The logits once; an exponential is taken as ten operations, and each of the likeliest looks at all keys."""
    logits = num_rows * vocab_size
    return OpCost(4 * logits, (12 + 2 * num_top) * logits)


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """The two launches for the model's vocabulary."""
    cut = VocabularyCut(shape.vocab_size)
    pieces = {"piece_best_ptr": "*fp32", "piece_sum_ptr": "*fp32", "piece_keys_ptr": "*i64"}
    sizes = dict.fromkeys(("logits_stride", "vocab_size", "num_pieces", "num_top"), "i32")
    aligned = ("logits_stride", "vocab_size") if shape.vocab_size % 16 == 0 else ()
    logits = {"logits_ptr": "*fp32", "rows_ptr": "*i64"}
    outs = {"chosen_ptr": "*fp32", "top_ptr": "*fp32", "top_ids_ptr": "*i64"}
    joined = {"PIECES": cut.padded_pieces, "CANDIDATES": cut.padded_pieces * MAX_TOP}
    return [
        KernelSpec(
            name="log-probabilities, scan",
            function=_scan,
            arguments={**logits, **pieces, **sizes},
            constants={"PIECE": PIECE},
            num_warps=_WARPS,
            num_stages=1,
            aligned=aligned,
            is_memory_bound=True,
        ),
        KernelSpec(
            name="log-probabilities, join",
            function=_join,
            arguments={**logits, "token_ids_ptr": "*i64", **pieces, **outs, **sizes},
            constants=joined,
            num_warps=_WARPS,
            num_stages=1,
            aligned=aligned,
        ),
    ]
