"""The draw: the token with the highest sum of tempered logit and counted Gumbel noise, over the pieces of each row.

The noise costs far more than reading a logit, so it is computed only where it can matter: not in groups whose best
token would lose with the largest noise there is, and in fp64 only in tiles where a cheap upper bound of some score
reaches a score that is known already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compiling import KernelSpec
from .launching import compile_options
from .ordered_keys import fp32_below, fp32_not_below
from .philox import MAX_GUMBEL, gumbel, gumbel_bound, random_words
from .sampling_tensors import GROUP, NO_TOKEN, PIECE, SamplingTensors, VocabularyCut, is_finite, is_greedy, row_best

_TILE = 1024  # tokens that a draw looks at together
_WARPS = 4
_MAX_GUMBEL = tl.constexpr(MAX_GUMBEL)
# Far above the error of a score in fp32: |z| < 20 there, and the logarithm is good to 1e-5.
_BOUND_ERROR = tl.constexpr(1e-3)


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits_ptr,  # [S, vocab_size] fp32, rows logits_stride apart
    group_best_ptr,  # [S, num_pieces * PIECE / GROUP] fp32
    piece_best_ptr,  # [S, num_pieces] fp32
    piece_id_ptr,  # [S, num_pieces] int32
    lowest_ptr,  # [S] fp32, read where HAS_FILTERS
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_low_ptr,
    seed_high_ptr,
    choice_ptr,
    position_ptr,
    score_ptr,  # out: [S, num_pieces] fp64; -inf where no token of the piece can win
    drawn_id_ptr,  # out: [S, num_pieces] int32
    logits_stride,
    vocab_size,
    num_pieces,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    piece = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    greedy = is_greedy(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row).to(tl.float64))
    best = row_best(piece_best_ptr, row, num_pieces, PIECES)
    if is_finite(best) & (greedy == 0):
        key_low = tl.load(seed_low_ptr + row).to(tl.uint32)
        key_high = tl.load(seed_high_ptr + row).to(tl.uint32)
        choice = tl.load(choice_ptr + row).to(tl.uint32)
        position = tl.load(position_ptr + row).to(tl.uint32)
        lowest = _lowest(lowest_ptr, min_p_ptr, row, best, temperature, HAS_FILTERS)

        best_row = piece_best_ptr + row * num_pieces
        id_row = piece_id_ptr + row * num_pieces
        reach = _reach(
            best_row, id_row, num_pieces, lowest, best, temperature, position, choice, key_low, key_high, PIECES
        )
        least = fp32_below(tl.maximum(best.to(tl.float64) + temperature * (reach - _MAX_GUMBEL), -3.0e38))
        least = tl.maximum(least, lowest)

        top = tl.full([], float("-inf"), tl.float64)
        top_id = tl.full([], 0, tl.int32)
        for start in range(piece * PIECE, (piece + 1) * PIECE, TILE):
            group = start // GROUP + tl.arange(0, TILE // GROUP)
            group_best = tl.load(group_best_ptr + row * num_pieces * (PIECE // GROUP) + group)
            if tl.max(group_best, 0) >= least:
                quad = start // 4 + tl.arange(0, TILE // 4)
                token = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
                x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
                words = _joined_words(quad, position, choice, key_low, key_high)
                top, top_id = _better(top, top_id, reach, x, token, words, lowest, best, temperature)
        tl.store(score_ptr + row * num_pieces + piece, top)
        tl.store(drawn_id_ptr + row * num_pieces + piece, top_id)


@triton.jit
def _better(top, top_id, reach, x, token, words, lowest, best, temperature):  # type: ignore[no-untyped-def]
    """The best score so far and its token, after the tokens of `x` `[n, 4]`; these have higher ids."""
    kept = (x >= lowest) & (x > float("-inf"))
    bound = (x - best) * (1.0 / temperature).to(tl.float32) + gumbel_bound(words)
    highest = tl.max(tl.max(tl.where(kept, bound, float("-inf")), 1), 0).to(tl.float64)
    if highest + _BOUND_ERROR >= tl.maximum(reach, top):
        score = tl.where(kept, _score(x, best, temperature, words), float("-inf"))
        tile_top = tl.max(tl.max(score, 1), 0)
        if tile_top > top:
            top = tile_top
            top_id = tl.min(tl.min(tl.where(score == tile_top, token, NO_TOKEN), 1), 0)
    return top, top_id


@triton.jit
def _reach(  # type: ignore[no-untyped-def]
    piece_best_row,
    piece_id_row,
    num_pieces,
    lowest,
    best,
    temperature,
    position,
    choice,
    key_low,
    key_high,
    PIECES: tl.constexpr,
):
    """A score that the winner has at least: the highest of the best tokens of all pieces."""
    piece = tl.arange(0, PIECES)
    mask = piece < num_pieces
    x = tl.load(piece_best_row + piece, mask=mask, other=float("-inf"))
    token = tl.load(piece_id_row + piece, mask=mask, other=0)
    word0, word1, word2, word3 = random_words((token // 4).to(tl.uint32), position, choice, key_low, key_high)
    lane = token % 4
    word = tl.where(lane == 0, word0, tl.where(lane == 1, word1, tl.where(lane == 2, word2, word3)))
    return tl.max(tl.where(mask & (x >= lowest), _score(x, best, temperature, word), float("-inf")), 0)


@triton.jit
def _lowest(  # type: ignore[no-untyped-def]
    lowest_ptr, min_p_ptr, row, best, temperature, HAS_FILTERS: tl.constexpr
):
    """The fp32 logit that a token needs to pass all filters."""
    lowest = tl.full([], float("-inf"), tl.float32)
    min_p = tl.load(min_p_ptr + row).to(tl.float64)
    if min_p > 0.0:
        lowest = fp32_not_below(best.to(tl.float64) + tl.log(min_p) * temperature)
    if HAS_FILTERS:
        lowest = tl.maximum(lowest, tl.load(lowest_ptr + row))
    return lowest


@triton.jit
def _score(x, best, temperature, words):  # type: ignore[no-untyped-def]
    return (x.to(tl.float64) - best.to(tl.float64)) / temperature + gumbel(words)


@triton.jit
def _joined_words(quad, position, choice, key_low, key_high):  # type: ignore[no-untyped-def]
    """The random words of tokens 4q to 4q + 3 of each q in `quad` `[n]`, `[n, 4]`."""
    word0, word1, word2, word3 = random_words(quad.to(tl.uint32), position, choice, key_low, key_high)
    return tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [quad.shape[0], 4])


def launch_draw(
    logits: Tensor, params: SamplingTensors, scanned: tuple[Tensor, Tensor, Tensor, Tensor], has_filters: bool
) -> tuple[Tensor, Tensor]:
    """Best score of each piece, `[S, num_pieces]` fp64, and its token; neither is written for a row that is greedy.

    `scanned`: highest logits of the groups and of the pieces, the latter's ids, and the filters' lowest logits.
    """
    num_rows, vocab_size = logits.shape
    cut = VocabularyCut(vocab_size)
    score = torch.empty((num_rows, cut.num_pieces), dtype=torch.float64, device=logits.device)
    drawn_id = torch.empty((num_rows, cut.num_pieces), dtype=torch.int32, device=logits.device)
    _draw[(cut.num_pieces, num_rows)](
        logits,
        *scanned,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed_low,
        params.seed_high,
        params.choice,
        params.position,
        score,
        drawn_id,
        logits.stride(0),
        vocab_size,
        cut.num_pieces,
        PIECE=PIECE,
        GROUP=GROUP,
        TILE=_TILE,
        PIECES=cut.padded_pieces,
        HAS_FILTERS=has_filters,
        **compile_options(_WARPS, 1),
    )
    return score, drawn_id


def draw_spec(vocab_size: int, name: str, has_filters: bool) -> KernelSpec:
    """The launch for a vocabulary."""
    rules = {"temperature_ptr": "*fp64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64"}
    return KernelSpec(
        name=name,
        function=_draw,
        arguments={
            "logits_ptr": "*fp32",
            "group_best_ptr": "*fp32",
            "piece_best_ptr": "*fp32",
            "piece_id_ptr": "*i32",
            "lowest_ptr": "*fp32",
            **rules,
            **dict.fromkeys(("seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr"), "*i64"),
            "score_ptr": "*fp64",
            "drawn_id_ptr": "*i32",
            "logits_stride": "i32",
            "vocab_size": "i32",
            "num_pieces": "i32",
        },
        constants={
            "PIECE": PIECE,
            "GROUP": GROUP,
            "TILE": _TILE,
            "PIECES": VocabularyCut(vocab_size).padded_pieces,
            "HAS_FILTERS": has_filters,
        },
        num_warps=_WARPS,
        num_stages=1,
        aligned=("logits_stride", "vocab_size") if vocab_size % 16 == 0 else (),
        is_memory_bound=True,
    )
