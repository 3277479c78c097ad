"""How long one forward pass takes on a device that is not here. Seconds; pure functions of the step's lengths.

    TableDevice     kernel times measured on real GPUs (sim/step_times.json): a table over the tokens of the step for
                    everything but attention, and fits for attention
    LinearDevice    the form that workers learn (core/step_cost.py): for hand-computed examples
    OptDevice       A100 coefficients of DistServe's simulator, for comparisons with it

None of them knows the host or the sampler: `Overheads` does.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Protocol

import msgspec

from ..core.errors import ConfigurationError
from ..core.step_cost import StepCost, StepShape


class Device(Protocol):
    def step_s(self, shape: StepShape, num_chunks: int) -> float:
        """Duration of a forward pass of that shape with `num_chunks` prompt chunks in it."""


@dataclass(frozen=True)
class Overheads:
    """What the tables do not have: the host's planning and launching before a step can start, and on the device
    lm_head and sampling of first tokens after hand-overs.
    """

    per_step_s: float = 0.0
    per_sequence_s: float = 0.0
    sampling_s: float = 0.0

    def host_s(self, num_sequences: int) -> float:
        return self.per_step_s + self.per_sequence_s * num_sequences


@dataclass(frozen=True)
class LinearDevice:
    cost: StepCost

    def step_s(self, shape: StepShape, num_chunks: int) -> float:
        return self.cost.seconds(shape)


class DeviceModel(msgspec.Struct, frozen=True):
    """One model on one kind of device. Times in ms, as in the source.

    `linear_ms[i]`: all kernels but attention, for a step of `linear_tokens[i]` tokens. `prefill_attention` (a, b, c):
    a + b * chunks + c * X; `decode_attention`: a + b * B + c * S, in the letters of core/step_cost.py.
    """

    name: str
    linear_tokens: tuple[float, ...]
    linear_ms: tuple[float, ...]
    prefill_attention: tuple[float, float, float]
    decode_attention: tuple[float, float, float]
    kv_bytes_per_token: int
    num_layers: int
    kv_capacity_tokens: int  # estimate: 0.9 of the memory less weights and 3.5 GB
    link_bytes_per_s: float  # between two such devices in one host


class _DataFile(msgspec.Struct, frozen=True):
    source: str
    models: tuple[DeviceModel, ...]


class TableDevice:
    """Interpolates the table; a step outside of it continues the line of the nearest two points."""

    def __init__(self, model: DeviceModel):
        self.model = model
        self._tokens = model.linear_tokens
        points = list(zip(model.linear_tokens, model.linear_ms, strict=True))
        self._lines = [_line(*interval) for interval in pairwise(points)]

    def step_s(self, shape: StepShape, num_chunks: int) -> float:
        num_tokens = shape.num_prompt_tokens + shape.num_decodes
        index = min(max(bisect_right(self._tokens, num_tokens) - 1, 0), len(self._lines) - 1)
        intercept, slope = self._lines[index]
        milliseconds = intercept + slope * num_tokens
        if num_chunks:
            a, b, c = self.model.prefill_attention
            milliseconds += a + b * num_chunks + c * shape.prompt_products
        if shape.num_decodes:
            a, b, c = self.model.decode_attention
            milliseconds += a + b * shape.num_decodes + c * shape.decode_context
        return milliseconds / 1000


def _line(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Through two points: (value at 0, slope)."""
    slope = (end[1] - start[1]) / (end[0] - start[0])
    return start[1] - start[0] * slope, slope


class OptDevice:
    """OPT on an A100-80G by the coefficients of DistServe's simulator, its fixed overheads included.

    Prompts cost a + b * sum(len) + c * sum(len^2), where a chunk counts the growth of len^2 (twice its products).
    Decodes cost a + b * S + c * B with other coefficients from `large_batch` sequences on. Its simulator never mixes
    the two; here a mixed step pays both parts and only once what either pays for an empty step.
    """

    def __init__(
        self,
        prefill: Sequence[float],
        decode_small: Sequence[float],
        decode_large: Sequence[float],
        large_batch: int = 95,
    ):
        self._prefill = tuple(prefill)
        self._small, self._large, self._large_batch = tuple(decode_small), tuple(decode_large), large_batch

    def step_s(self, shape: StepShape, num_chunks: int) -> float:
        prompts_ms = decodes_ms = shared_ms = 0.0
        decode = self._small if shape.num_decodes < self._large_batch else self._large
        if num_chunks:
            a, b, c = self._prefill
            prompts_ms = a + b * shape.num_prompt_tokens + 2 * c * shape.prompt_products
            prompts_ms += 1 + 2 + 1e-4 * shape.num_prompt_tokens
        if shape.num_decodes:
            a, b, c = decode
            decodes_ms = a + b * shape.decode_context + c * shape.num_decodes
            decodes_ms += 2 + 1e-4 * (shape.decode_context - shape.num_decodes)
        if num_chunks and shape.num_decodes:
            shared_ms = min(self._prefill[0], decode[0]) + 2
        return (prompts_ms + decodes_ms - shared_ms) / 1000


@cache
def device_models() -> dict[str, DeviceModel]:
    """The models that come with the package, by name."""
    data = files(__package__).joinpath("step_times.json").read_bytes()
    return {model.name: model for model in msgspec.json.decode(data, type=_DataFile).models}


def device_model(name: str) -> DeviceModel:
    """Raises ConfigurationError that lists the names there are."""
    try:
        return device_models()[name]
    except KeyError:
        raise ConfigurationError(f"no device model {name!r}; there are {', '.join(device_models())}") from None
