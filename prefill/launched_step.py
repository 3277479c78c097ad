"""LaunchedStep: a forward pass that the device has been given and the prefill role has not collected yet."""

from dataclasses import dataclass

from torch import Tensor

from ..engine.launched import LayerProgress
from .entry import PrefillEntry


@dataclass(frozen=True)
class LaunchedChunk:
    entry: PrefillEntry
    num_tokens: int
    stop: int  # tokens of the prompt that are computed when it is done
    is_last: bool


@dataclass(frozen=True)
class LaunchedStep:
    chunks: list[LaunchedChunk]
    hidden: Tensor  # [number of last chunks, hidden_size]
    progress: LayerProgress
    number: int  # SequenceBlocks.step_launched
