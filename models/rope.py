"""Frequencies of the rotary embedding (Su et al., 2021), and what turns partial rotation into a whole one."""

import math

import torch
from torch import Tensor

from ..vocab.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """One per pair of dimensions: `[D / 2]` float32; 0 for pairs that are not rotated."""
    rotary_dim = int(config.head_dim * config.partial_rotary_factor)
    frequencies = _scaled(_plain(config.rope_theta, rotary_dim), config.rope_theta, config.rope_scaling)
    return torch.cat((frequencies, frequencies.new_zeros((config.head_dim - rotary_dim) // 2)))


def local_inverse_frequencies(config: ModelConfig) -> Tensor:
    """Those of layers with a window, where they have their own base (Gemma 3)."""
    return _plain(config.local_rope_theta, config.head_dim)


def whole_rotation_order(head_dim: int, rotary_dim: int) -> Tensor:
    """The order of a head's dimensions in which kernels, which pair i with i + D / 2, rotate the right ones.

        stored     r0 r1 | R0 R1 | p0 p1 P0 P1      r pairs with R, p and P are not rotated
        reordered  r0 r1   p0 p1 | R0 R1   P0 P1    p and P get the frequency 0

    Scores are the same as long as queries and keys are reordered alike.
    """
    half, half_plain = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second, plain, plain_second = torch.split(torch.arange(head_dim), [half, half, half_plain, half_plain])
    return torch.cat((first, plain, second, plain_second))


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _scaled(frequencies: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Stretch the frequencies for contexts longer than the training's; see RopeScaling."""
    if scaling is None:
        return frequencies
    match scaling.rope_type:
        case "linear":
            return frequencies / scaling.factor
        case "longrope":
            return frequencies / torch.tensor(scaling.factors)
        case "llama3":  # turns of the pair within the original context decide, linearly in between
            turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
            span = scaling.high_freq_factor - scaling.low_freq_factor
            keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        case "yarn":
            keep = _yarn_ramp(len(frequencies), theta, scaling)
        case unknown:
            raise ValueError(f"no rotary scaling is called {unknown!r}")
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn_ramp(num_pairs: int, theta: float, scaling: RopeScaling) -> Tensor:
    """The part of each frequency that is kept: 1 to 0, linearly in the pair's index."""

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    return 1 - ((torch.arange(num_pairs) - first) / max(last - first, 0.001)).clamp(0, 1)
