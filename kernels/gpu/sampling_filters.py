"""Top-k and top-p as one threshold a row, without sorting: the largest logit v such that the tokens of at least v are
k in number, or hold top_p of the mass. Tokens of equal logits stay or go together.

1. `_cut`: a logit that the threshold cannot be below, found from the groups' highest logits alone;
2. `_gather`: the logits from there up, packed (mostly some hundred of a vocabulary);
3. `_select`: the threshold, by a search over the floats' ordered keys that asks for 16 of them at a time.

Counts are exact. Masses are fp64 sums in an order fixed by the row, another one than the CPU sampler's: the two may
differ by a token whose cumulative probability is within 1e-12 of top_p.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .launching import compile_options
from .ordered_keys import MINUS_INF_KEY, NO_KEY, asked_keys, float_of_key, fp32_below, narrowed, ordered_key
from .sampling_tensors import GROUP, PIECE, SamplingTensors, VocabularyCut, is_finite, is_greedy, row_best

_MAX_STRANDS = 32
_CHUNK = 16  # groups a strand looks at together
_SEARCHED = 1024  # packed logits that the search looks at together: 16 comparisons of each must fit in registers
# The share by which sums in different orders may differ at most: the cut allows for it.
_SLACK = tl.constexpr(1e-9)


@triton.jit
def has_filter(top_k, top_p, vocab_size):  # type: ignore[no-untyped-def]
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)


@triton.jit
def _weights(x, best, temperature):  # type: ignore[no-untyped-def]
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) * (1.0 / temperature))


@triton.jit
def _total_mass(  # type: ignore[no-untyped-def]
    piece_best_ptr, piece_mass_ptr, row, best, temperature, num_pieces, PIECES: tl.constexpr
):
    """The mass of a whole row relative to its best token, from the pieces' masses relative to their own."""
    piece = tl.arange(0, PIECES)
    mask = piece < num_pieces
    piece_best = tl.load(piece_best_ptr + row * num_pieces + piece, mask=mask, other=float("-inf"))
    mass = tl.load(piece_mass_ptr + row * num_pieces + piece, mask=mask, other=0.0)
    return tl.sum(mass * _weights(piece_best, best, temperature), 0)


@triton.jit
def _top_k_cut(key, high, top_k, num_groups):  # type: ignore[no-untyped-def]
    """The k-th highest of the groups' best: k groups have a token of at least that, so the k-th token is not below."""
    low = tl.full([], MINUS_INF_KEY, tl.int64)
    if top_k > num_groups:
        high = low
    while low < high:
        count = tl.sum((key[None, :] >= asked_keys(low, high)[:, None]).to(tl.int32), 1)
        low, high = narrowed(low, high, tl.sum((count >= top_k).to(tl.int64), 0))
    return float_of_key(low.to(tl.int32))


@triton.jit
def _top_p_cut(key, weight, low, high, goal):  # type: ignore[no-untyped-def]
    """The highest logit from which on the groups' best alone hold the mass `goal`; `low` if they never do."""
    if tl.sum(tl.where(key >= low, weight, 0.0), 0) < goal:
        high = low
    while low < high:
        mass = tl.sum(tl.where(key[None, :] >= asked_keys(low, high)[:, None], weight[None, :], 0.0), 1)
        low, high = narrowed(low, high, tl.sum((mass >= goal).to(tl.int64), 0))
    return float_of_key(low.to(tl.int32))


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    group_best_ptr,  # [S, num_pieces * PIECE / GROUP] fp32
    piece_best_ptr,  # [S, num_pieces] fp32
    piece_mass_ptr,  # [S, num_pieces] fp64
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    cut_ptr,  # out: [S] fp32; +inf for a row without these filters
    vocab_size,
    num_pieces,
    PIECES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PER_PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    best = row_best(piece_best_ptr, row, num_pieces, PIECES)
    cut = float("inf")
    wanted = is_finite(best) & has_filter(top_k, top_p, vocab_size)
    if wanted & (is_greedy(temperature, top_k, top_p) == 0):
        num_groups = num_pieces * GROUPS_PER_PIECE
        group = tl.arange(0, GROUPS)
        mask = group < num_groups
        x = tl.load(group_best_ptr + row * num_groups + group, mask=mask, other=float("-inf"))
        key = tl.where(mask, ordered_key(x), NO_KEY)
        high = ordered_key(best).to(tl.int64)
        if (top_k > 0) & (top_k < vocab_size):
            cut = _top_k_cut(key, high, top_k, num_groups)
        else:
            total = _total_mass(piece_best_ptr, piece_mass_ptr, row, best, temperature, num_pieces, PIECES)
            # The tokens below v hold at most vocab_size times the mass of v. Up to 1 - top_p of it all may go.
            spare = tl.maximum((1.0 - top_p - _SLACK) * total, 1e-300)
            floor = best.to(tl.float64) + temperature * tl.log(spare / vocab_size)
            weight = tl.where(mask, _weights(x, best, temperature), 0.0)
            floor_key = ordered_key(fp32_below(tl.maximum(floor, -3.0e38))).to(tl.int64)
            cut = _top_p_cut(key, weight, floor_key, high, top_p * total * (1.0 + _SLACK))
    tl.store(cut_ptr + row, cut)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart
    group_best_ptr,  # [S, num_groups] fp32
    cut_ptr,  # [S] fp32
    kept_ptr,  # out: [S, STRANDS, strand_length] fp32
    num_kept_ptr,  # out: [S, STRANDS] int32
    logits_stride,
    vocab_size,
    num_groups,
    strand_length,
    STRANDS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    strand = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    cut = tl.load(cut_ptr + row)
    num_kept = tl.full([], 0, tl.int32)
    if cut < float("inf"):
        kept_row = kept_ptr + (row * STRANDS + strand) * strand_length
        for start in range(0, num_groups, CHUNK * STRANDS):
            group = start + strand + tl.arange(0, CHUNK) * STRANDS
            group_best = tl.load(
                group_best_ptr + row * num_groups + group, mask=group < num_groups, other=float("-inf")
            )
            some = (group_best >= cut) & (group < num_groups)
            if tl.max(some.to(tl.int32), 0) > 0:
                token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                mask = some[:, None] & (token < vocab_size)
                x = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=float("-inf"))
                x = tl.reshape(x, [CHUNK * GROUP])
                keep = tl.reshape(mask, [CHUNK * GROUP]) & (x >= cut)
                index = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
                tl.store(kept_row + index, x, mask=keep)
                num_kept += tl.sum(keep.to(tl.int32), 0)
    tl.store(num_kept_ptr + row * STRANDS + strand, num_kept)


@triton.jit
def _packed(  # type: ignore[no-untyped-def]
    kept_row, num_kept, start, strand_length, STRANDS: tl.constexpr, WIDTH: tl.constexpr
):
    """Logits start to start + WIDTH of every strand, and which of them exist, `[STRANDS * WIDTH]`."""
    index = start + tl.arange(0, WIDTH)
    mask = index[None, :] < num_kept[:, None]
    strand = tl.arange(0, STRANDS)
    x = tl.load(kept_row + strand[:, None] * strand_length + index[None, :], mask=mask, other=float("-inf"))
    return tl.reshape(x, [STRANDS * WIDTH]), tl.reshape(mask, [STRANDS * WIDTH])


@triton.jit
def _counts_from(  # type: ignore[no-untyped-def]
    asked, kept_row, num_kept, strand_length, STRANDS: tl.constexpr, WIDTH: tl.constexpr
):
    """How many packed logits have at least the key `asked` `[n]`, `[n]` int32."""
    count = tl.zeros_like(asked).to(tl.int32)
    for start in range(0, tl.max(num_kept, 0), WIDTH):
        x, mask = _packed(kept_row, num_kept, start, strand_length, STRANDS, WIDTH)
        key = tl.where(mask, ordered_key(x), NO_KEY)
        count += tl.sum((key[None, :] >= asked[:, None]).to(tl.int32), 1)
    return count


@triton.jit
def _masses_from(  # type: ignore[no-untyped-def]
    asked, kept_row, num_kept, strand_length, best, temperature, STRANDS: tl.constexpr, WIDTH: tl.constexpr
):
    """The mass, relative to the best token, of the packed logits of at least the key `asked` `[n]`, `[n]` fp64."""
    mass = tl.zeros_like(asked).to(tl.float64)
    for start in range(0, tl.max(num_kept, 0), WIDTH):
        x, mask = _packed(kept_row, num_kept, start, strand_length, STRANDS, WIDTH)
        key = tl.where(mask, ordered_key(x), NO_KEY)
        weight = _weights(x, best, temperature)  # 0 where nothing is
        mass += tl.sum(tl.where(key[None, :] >= asked[:, None], weight[None, :], 0.0), 1)
    return mass


@triton.jit
def _select(  # type: ignore[no-untyped-def]
    kept_ptr,  # [S, STRANDS, strand_length] fp32
    num_kept_ptr,  # [S, STRANDS] int32
    cut_ptr,  # [S] fp32
    piece_best_ptr,  # [S, num_pieces] fp32
    piece_mass_ptr,  # [S, num_pieces] fp64
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    lowest_ptr,  # out: [S] fp32; -inf for a row without these filters
    vocab_size,
    num_pieces,
    strand_length,
    PIECES: tl.constexpr,
    STRANDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(cut_ptr + row)
    lowest = float("-inf")
    if cut < float("inf"):
        temperature = tl.load(temperature_ptr + row).to(tl.float64)
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p = tl.load(top_p_ptr + row).to(tl.float64)
        best = row_best(piece_best_ptr, row, num_pieces, PIECES)
        kept_row = kept_ptr + row * STRANDS * strand_length
        num_kept = tl.load(num_kept_ptr + row * STRANDS + tl.arange(0, STRANDS))
        low = ordered_key(cut).to(tl.int64)
        high = ordered_key(best).to(tl.int64)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        if has_top_k:
            while low < high:
                count = _counts_from(asked_keys(low, high), kept_row, num_kept, strand_length, STRANDS, WIDTH)
                low, high = narrowed(low, high, tl.sum((count >= top_k).to(tl.int64), 0))
            lowest = float_of_key(low.to(tl.int32))
        if top_p < 1.0:
            high = ordered_key(best).to(tl.int64)
            asked = tl.full([16], 0, tl.int64) + low
            total = tl.max(_masses_from(asked, kept_row, num_kept, strand_length, best, temperature, STRANDS, WIDTH), 0)
            held = total
            if not has_top_k:
                total = _total_mass(piece_best_ptr, piece_mass_ptr, row, best, temperature, num_pieces, PIECES)
            goal = top_p * total
            if held >= goal:  # else rounding left all there is just below, and all stays
                while low < high:
                    mass = _masses_from(
                        asked_keys(low, high), kept_row, num_kept, strand_length, best, temperature, STRANDS, WIDTH
                    )
                    low, high = narrowed(low, high, tl.sum((mass >= goal).to(tl.int64), 0))
                lowest = float_of_key(low.to(tl.int32))
    tl.store(lowest_ptr + row, lowest)


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """How the filters cut a vocabulary: strand s packs groups s, s + strands, s + 2 * strands, ...

    They are interleaved because likely tokens lie near one another in a vocabulary.
    """

    strands: int
    strand_length: int  # logits that one strand may have to pack: all of its groups
    width: int  # logits of each strand that the search looks at together
    cut_warps: int
    gather_warps: int
    select_warps: int


def filter_config(cut: VocabularyCut) -> FilterConfig:
    """It depends on the vocabulary only; warps such that the comparisons fit in registers."""
    strands = min(max(cut.padded_groups // _CHUNK, 1), _MAX_STRANDS)
    return FilterConfig(
        strands=strands,
        strand_length=int(triton.cdiv(cut.num_groups, strands)) * GROUP,
        width=_SEARCHED // strands,
        cut_warps=min(max(cut.padded_groups // 256, 4), 16),
        gather_warps=4,
        select_warps=16,
    )


def launch_filters(
    logits: Tensor, params: SamplingTensors, group_best: Tensor, piece_best: Tensor, piece_mass: Tensor
) -> Tensor:
    """The logit `[S]` that a token of each row needs to pass top-k and top-p; -inf for a row without them.

    The last three are what the first pass of `sampling.sample` left: highest logits `[S, num_groups]` and
    `[S, num_pieces]`, and for rows with top-p alone the fp64 masses `[S, num_pieces]`.
    """
    num_rows, vocab_size = logits.shape
    cut = VocabularyCut(vocab_size)
    config, device = filter_config(cut), logits.device
    bound = torch.empty(num_rows, dtype=torch.float32, device=device)
    kept = torch.empty((num_rows, config.strands, config.strand_length), dtype=torch.float32, device=device)
    num_kept = torch.empty((num_rows, config.strands), dtype=torch.int32, device=device)
    rules = (params.temperature, params.top_k, params.top_p)
    _cut[(num_rows,)](
        group_best,
        piece_best,
        piece_mass,
        *rules,
        bound,
        vocab_size,
        cut.num_pieces,
        PIECES=cut.padded_pieces,
        GROUPS=cut.padded_groups,
        GROUPS_PER_PIECE=PIECE // GROUP,
        **compile_options(config.cut_warps, 1),
    )
    _gather[(config.strands, num_rows)](
        logits,
        group_best,
        bound,
        kept,
        num_kept,
        logits.stride(0),
        vocab_size,
        cut.num_groups,
        config.strand_length,
        STRANDS=config.strands,
        GROUP=GROUP,
        CHUNK=_CHUNK,
        **compile_options(config.gather_warps, 1),
    )
    return _launch_select(kept, num_kept, (bound, piece_best, piece_mass, *rules), cut)


def _launch_select(kept: Tensor, num_kept: Tensor, inputs: tuple[Tensor, ...], cut: VocabularyCut) -> Tensor:
    config = filter_config(cut)
    lowest = torch.empty(len(kept), dtype=torch.float32, device=kept.device)
    _select[(len(kept),)](
        kept,
        num_kept,
        *inputs,
        lowest,
        cut.vocab_size,
        cut.num_pieces,
        config.strand_length,
        PIECES=cut.padded_pieces,
        STRANDS=config.strands,
        WIDTH=config.width,
        **compile_options(config.select_warps, 1),
    )
    return lowest


def filter_specs(vocab_size: int) -> list[KernelSpec]:
    """The three launches for a vocabulary."""
    cut = VocabularyCut(vocab_size)
    config = filter_config(cut)
    rules = {"temperature_ptr": "*fp64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64"}
    pieces = {"piece_best_ptr": "*fp32", "piece_mass_ptr": "*fp64"}
    packed = {"kept_ptr": "*fp32", "num_kept_ptr": "*i32"}
    sizes = {"vocab_size": "i32", "num_pieces": "i32", "logits_stride": "i32", "num_groups": "i32"}
    aligned = ("num_groups", "strand_length", *(("vocab_size", "logits_stride") if vocab_size % 16 == 0 else ()))

    def spec(name: str, function: Any, arguments: dict[str, str], constants: dict[str, int], warps: int) -> KernelSpec:
        # The sizes that this kernel takes come last, in any order: the signature is by name.
        taken = {n: kind for n, kind in {**sizes, "strand_length": "i32"}.items() if n in function.arg_names}
        fitting = tuple(n for n in aligned if n in taken)
        return KernelSpec(name, function, {**arguments, **taken}, constants, warps, 1, fitting)

    pieces_constant = {"PIECES": cut.padded_pieces}
    return [
        spec(
            "sampling cut",
            _cut,
            {"group_best_ptr": "*fp32", **pieces, **rules, "cut_ptr": "*fp32"},
            {**pieces_constant, "GROUPS": cut.padded_groups, "GROUPS_PER_PIECE": PIECE // GROUP},
            config.cut_warps,
        ),
        spec(
            "sampling gather",
            _gather,
            {"logits_ptr": "*fp32", "group_best_ptr": "*fp32", "cut_ptr": "*fp32", **packed},
            {"STRANDS": config.strands, "GROUP": GROUP, "CHUNK": _CHUNK},
            config.gather_warps,
        ),
        spec(
            "sampling select",
            _select,
            {**packed, "cut_ptr": "*fp32", **pieces, **rules, "lowest_ptr": "*fp32"},
            {**pieces_constant, "STRANDS": config.strands, "WIDTH": config.width},
            config.select_warps,
        ),
    ]
