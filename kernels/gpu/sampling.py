"""Logits to token ids, the same tokens as the CPU sampler's (engine/sampler.py): greedy, or the argmax over the tokens
that pass the filters of (logit - highest logit) / temperature + counted Gumbel noise, in fp64.

    _scan      highest logit of each piece and of each group of 64 tokens; masses for rows with top-p   one pass
    filters    only where some row has top-k or top-p: sampling_filters.py                              part of a pass
    _draw      best score of each piece; reads the groups that could win                                part of a pass
    _choose    a row's pieces to one token id, also into its feedback slot

Rows are cut into pieces of 4096 tokens, each a program's, so that one row is spread over the device. The argmax is
exact and does not depend on the order of the pieces; equal scores go to the lowest id.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .cost import OpCost
from .launching import compile_options, require, require_tensor
from .model_shapes import ModelShape
from .sampling_draw import draw_spec, launch_draw
from .sampling_filters import filter_specs, launch_filters
from .sampling_tensors import GROUP, NO_TOKEN, PIECE, SamplingTensors, VocabularyCut, is_finite, is_greedy, row_best

__all__ = ["SamplingTensors", "argmax", "kernel_specs", "sample", "sampling_cost"]

_WARPS = 4  # 32 logits a thread in the scan: eight 16-byte loads in flight
# A token this many units of z below the best adds nothing to a sum of up to 2**20 masses in fp64.
_LEAST_Z = tl.constexpr(-55.0)


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    group_best_ptr,  # out where HAS_DRAWS: [S, num_pieces * PIECE / GROUP] fp32
    piece_best_ptr,  # out: [S, num_pieces] fp32; +inf if some logit is not a number
    piece_id_ptr,  # out: [S, num_pieces] int32, lowest id among equals
    piece_mass_ptr,  # out where HAS_FILTERS, for rows with top-p alone: [S, num_pieces] fp64
    logits_stride,
    vocab_size,
    num_pieces,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_DRAWS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    logits_row = logits_ptr + row * logits_stride
    token = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_row + token, mask=token < vocab_size, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)  # neither has a finite best, and maxima treat only inf alike everywhere
    best = tl.max(x, 0)
    slot = row * num_pieces + piece
    tl.store(piece_best_ptr + slot, best)
    tl.store(piece_id_ptr + slot, tl.min(tl.where(x == best, token, NO_TOKEN), 0))
    if HAS_DRAWS:
        group = tl.arange(0, PIECE // GROUP)
        group_best = tl.max(tl.reshape(x, [PIECE // GROUP, GROUP]), 1)
        tl.store(group_best_ptr + slot * (PIECE // GROUP) + group, group_best)
    if HAS_FILTERS:
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        temperature = tl.load(temperature_ptr + row).to(tl.float64)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        if (top_p < 1.0) & (has_top_k == 0) & (is_greedy(temperature, top_k, top_p) == 0):
            mass = tl.full([], 0.0, tl.float64)
            if is_finite(best):
                mass = _mass(logits_row, piece, best, temperature, vocab_size, PIECE)
            tl.store(piece_mass_ptr + slot, mass)


@triton.jit
def _mass(logits_row, piece, best, temperature, vocab_size, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of exp((x - best) / temperature) over a piece, fp64; it is in the first-level cache by now."""
    mass = tl.full([], 0.0, tl.float64)
    least = best + _LEAST_Z * temperature.to(tl.float32)
    for start in range(0, PIECE, 1024):
        token = piece * PIECE + start + tl.arange(0, 1024)
        x = tl.load(logits_row + token, mask=token < vocab_size, other=float("-inf"))
        if tl.max(x, 0) >= least:
            z = (x.to(tl.float64) - best.to(tl.float64)) * (1.0 / temperature)
            mass += tl.sum(tl.exp(z), 0)
    return mass


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    piece_best_ptr,  # [S, num_pieces] fp32
    piece_id_ptr,  # [S, num_pieces] int32
    score_ptr,  # [S, num_pieces] fp64, read where HAS_DRAWS
    drawn_id_ptr,  # [S, num_pieces] int32
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    feedback_ptr,  # [num_slots] int64, written where HAS_FEEDBACK
    feedback_slot_ptr,  # [S]; negative: none
    out_ptr,  # out: [S] int64; -1 for a row without a finite highest logit
    num_pieces,
    num_slots,
    PIECES: tl.constexpr,
    HAS_DRAWS: tl.constexpr,
    HAS_FEEDBACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    mask = piece < num_pieces
    index = row * num_pieces + piece
    best = row_best(piece_best_ptr, row, num_pieces, PIECES)
    x = tl.load(piece_best_ptr + index, mask=mask, other=float("-inf"))
    token = tl.load(piece_id_ptr + index, mask=mask, other=NO_TOKEN)
    chosen = tl.min(tl.where(mask & (x == best), token, NO_TOKEN), 0)
    if HAS_DRAWS:
        temperature = tl.load(temperature_ptr + row).to(tl.float64)
        greedy = is_greedy(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row).to(tl.float64))
        if is_finite(best) & (greedy == 0):
            score = tl.load(score_ptr + index, mask=mask, other=float("-inf"))
            drawn = tl.load(drawn_id_ptr + index, mask=mask, other=NO_TOKEN)
            chosen = tl.min(tl.where(mask & (score == tl.max(score, 0)), drawn, NO_TOKEN), 0)
    chosen = tl.where(is_finite(best), chosen, -1).to(tl.int64)
    tl.store(out_ptr + row, chosen)
    if HAS_FEEDBACK:
        slot = tl.load(feedback_slot_ptr + row).to(tl.int64)
        tl.store(feedback_ptr + slot, chosen, mask=(slot >= 0) & (slot < num_slots))


def sample(
    logits: Tensor,
    params: SamplingTensors,
    feedback: Tensor | None = None,
    feedback_slots: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token id per row of `logits` `[S, vocab_size]` fp32 (rows may lie apart; not changed), `[S]` int64.

    -1 for a row without a finite highest logit. Token s goes to `feedback[feedback_slots[s]]` too (int64 `[num_slots]`;
    int32 or int64 `[S]`), unless the slot is negative. Raises ValueError for wrong shapes or dtypes.
    """
    out = _checked_out(logits, out)
    num_rows, vocab_size = logits.shape
    params.check(num_rows)
    require((feedback is None) == (feedback_slots is None), "feedback and feedback_slots go together")
    if feedback is not None and feedback_slots is not None:
        require_tensor("feedback", feedback, (None,), torch.int64)
        require_tensor("feedback_slots", feedback_slots, (num_rows,), torch.int32, torch.int64)
        for name, tensor in (("feedback", feedback), ("feedback_slots", feedback_slots)):
            require(tensor.is_contiguous(), f"{name} is not contiguous")
    if num_rows == 0:
        return out
    cut = VocabularyCut(vocab_size)
    has_filters = params.any_drawn and params.any_filtered
    group_best, piece_best, piece_id, piece_mass = _launch_scan(logits, params, cut, has_filters)
    score, drawn_id = piece_best, piece_id  # never read unless some row is drawn
    if params.any_drawn:
        lowest = piece_best  # never read without filters
        if has_filters:
            lowest = launch_filters(logits, params, group_best, piece_best, piece_mass)
        score, drawn_id = launch_draw(logits, params, (group_best, piece_best, piece_id, lowest), has_filters)
    _choose[(num_rows,)](
        piece_best,
        piece_id,
        score,
        drawn_id,
        params.temperature,
        params.top_k,
        params.top_p,
        out if feedback is None else feedback,
        out if feedback_slots is None else feedback_slots,
        out,
        cut.num_pieces,
        0 if feedback is None else len(feedback),
        PIECES=cut.padded_pieces,
        HAS_DRAWS=params.any_drawn,
        HAS_FEEDBACK=feedback is not None,
        **compile_options(1, 1),
    )
    return out


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """The highest logit's id of each row of `[S, vocab_size]` fp32, the lowest among equals, `[S]` int64; one pass.

    -1 for a row whose highest logit is not finite, or in which one is not a number.
    """
    out = _checked_out(logits, out)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return out
    cut = VocabularyCut(vocab_size)
    _, piece_best, piece_id, _ = _launch_scan(logits, None, cut, has_filters=False)
    _choose[(num_rows,)](
        piece_best,
        piece_id,
        piece_best,
        piece_id,
        *(piece_best,) * 3,  # no rules are read without draws
        out,
        out,
        out,
        cut.num_pieces,
        0,
        PIECES=cut.padded_pieces,
        HAS_DRAWS=False,
        HAS_FEEDBACK=False,
        **compile_options(1, 1),
    )
    return out


def _checked_out(logits: Tensor, out: Tensor | None) -> Tensor:
    require_tensor("logits", logits, (None, None), torch.float32)
    require(logits.stride(1) == 1, "logits' last dimension is not contiguous")
    require(logits.shape[1] > 0, "logits have no tokens")
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    require_tensor("out", out, (len(logits),), torch.int64)
    require(out.is_contiguous(), "out is not contiguous")
    return out


def _launch_scan(
    logits: Tensor, params: SamplingTensors | None, cut: VocabularyCut, has_filters: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups' and pieces' best, pieces' ids and masses; what no later pass reads is empty."""
    num_rows, device = len(logits), logits.device
    has_draws = params is not None and params.any_drawn
    piece_best = torch.empty((num_rows, cut.num_pieces), dtype=torch.float32, device=device)
    piece_id = torch.empty((num_rows, cut.num_pieces), dtype=torch.int32, device=device)
    group_best = torch.empty((num_rows, cut.num_groups if has_draws else 0), dtype=torch.float32, device=device)
    piece_mass = torch.empty((num_rows, cut.num_pieces if has_filters else 0), dtype=torch.float64, device=device)
    rules = (piece_best,) * 3 if params is None else (params.temperature, params.top_k, params.top_p)
    _scan[(cut.num_pieces, num_rows)](
        logits,
        *rules,
        group_best,
        piece_best,
        piece_id,
        piece_mass,
        logits.stride(0),
        cut.vocab_size,
        cut.num_pieces,
        PIECE=PIECE,
        GROUP=GROUP,
        HAS_DRAWS=has_draws,
        HAS_FILTERS=has_filters,
        **compile_options(_WARPS, 1),
    )
    return group_best, piece_best, piece_id, piece_mass


def sampling_cost(num_rows: int, vocab_size: int, drawn: bool = True) -> OpCost:
    """The logits once, and once more for rows that are drawn (at most: groups that cannot win are not read again).

    Operations of a drawn token: about 90 integer ones for a quarter of a Philox block, and 10 for the bound.
    """
    size = num_rows * vocab_size
    return OpCost(4 * size * (2 if drawn else 1), size * (100 if drawn else 1))


_RULES = {"temperature_ptr": "*fp64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64"}
_PIECES = {"piece_best_ptr": "*fp32", "piece_id_ptr": "*i32"}


def kernel_specs(shape: ModelShape) -> list[KernelSpec]:
    """All that `sample` launches for the model's vocabulary, first with filters, then without."""
    cut = VocabularyCut(shape.vocab_size)
    sizes = {"logits_stride": "i32", "vocab_size": "i32", "num_pieces": "i32"}
    aligned = tuple(n for n in ("logits_stride", "vocab_size") if shape.vocab_size % 16 == 0)
    split = {"PIECE": PIECE, "GROUP": GROUP}
    specs = list(filter_specs(shape.vocab_size))
    for drawn, filtered in ((True, True), (True, False), (False, False)):
        kind = "greedy" if not drawn else "filtered" if filtered else "drawn"
        specs.append(
            KernelSpec(
                name=f"sampling scan, {kind}",
                function=_scan,
                arguments={
                    "logits_ptr": "*fp32",
                    **_RULES,
                    "group_best_ptr": "*fp32",
                    **_PIECES,
                    "piece_mass_ptr": "*fp64",
                    **sizes,
                },
                constants={**split, "HAS_DRAWS": drawn, "HAS_FILTERS": filtered},
                num_warps=_WARPS,
                num_stages=1,
                aligned=aligned,
                is_memory_bound=True,
            )
        )
        specs.append(_choose_spec(cut, kind, drawn))
        if drawn:
            specs.append(draw_spec(shape.vocab_size, f"sampling draw, {kind}", filtered))
    return specs


def _choose_spec(cut: VocabularyCut, kind: str, drawn: bool) -> KernelSpec:
    return KernelSpec(
        name=f"sampling choice, {kind}",
        function=_choose,
        arguments={
            **_PIECES,
            "score_ptr": "*fp64",
            "drawn_id_ptr": "*i32",
            **_RULES,
            "feedback_ptr": "*i64",
            "feedback_slot_ptr": "*i64",
            "out_ptr": "*i64",
            "num_pieces": "i32",
            "num_slots": "i32",
        },
        constants={"PIECES": cut.padded_pieces, "HAS_DRAWS": drawn, "HAS_FEEDBACK": True},
        num_warps=1,
        num_stages=1,
    )
