"""DeviceSampler: the sampler's rules on the device, whose tokens the host need not know to go on."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.gpu.penalties import add_bias
from ..kernels.gpu.sampling import sample
from ..kernels.gpu.sampling_tensors import SamplingTensors
from .launched import ArrivingTokens, record_event
from .philox import seed_words
from .sampler import SamplingRow, check_rows
from .upload import Field, Packing, Upload

_FLOATS = ("temperature", "top_p", "min_p")
_INTEGERS = ("top_k", "seed_low", "seed_high", "choice", "position", "feedback_slots")
_INITIAL_BYTES = 1 << 16


class DeviceSampler:
    """Sampler of the Triton kernels; `feedback` `[slots]` int64 is what the next steps read."""

    def __init__(self, feedback: Tensor):
        self._feedback = feedback
        self._upload = Upload(feedback.device, _INITIAL_BYTES)

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> ArrivingTokens:
        check_rows(logits, rows)
        suppressed = [(i, token_id) for i, row in enumerate(rows) for token_id in sorted(set(row.suppress))]
        packing = Packing(_fields(len(rows), len(suppressed)))
        on_device = packing.tensors(self._upload.send(packing, _values(rows, suppressed)))
        if suppressed:
            logits = logits.clone()
            add_bias(logits, on_device["bias_rows"], on_device["bias_ids"], on_device["bias"])
        drawn = [row for row in rows if not row.greedy]
        params = SamplingTensors(
            temperature=on_device["temperature"],
            top_k=on_device["top_k"],
            top_p=on_device["top_p"],
            min_p=on_device["min_p"],
            seed_low=on_device["seed_low"],
            seed_high=on_device["seed_high"],
            choice=on_device["choice"],
            position=on_device["position"],
            any_drawn=bool(drawn),
            any_filtered=any(row.params.top_k > 0 or row.params.top_p < 1.0 for row in drawn),
        )
        token_ids = sample(logits, params, self._feedback, on_device["feedback_slots"])
        device = self._feedback.device
        arriving = torch.empty(len(rows), dtype=token_ids.dtype, pin_memory=device.type == "cuda")
        arriving.copy_(token_ids, non_blocking=True)
        return ArrivingTokens(arriving, record_event(device))


def _fields(num_rows: int, num_suppressed: int) -> list[Field]:
    return [
        *(Field(name, np.float64, (num_rows,)) for name in _FLOATS),
        *(Field(name, np.int64, (num_rows,)) for name in _INTEGERS),
        Field("bias", np.float64, (num_suppressed,)),
        *(Field(name, np.int64, (num_suppressed,)) for name in ("bias_rows", "bias_ids")),
    ]


def _values(rows: Sequence[SamplingRow], suppressed: list[tuple[int, int]]) -> dict[str, object]:
    seeds = [seed_words(row.params.seed) for row in rows]
    return {
        "temperature": [row.params.temperature for row in rows],
        "top_p": [row.params.top_p for row in rows],
        "min_p": [row.params.min_p for row in rows],
        "top_k": [row.params.top_k for row in rows],
        "seed_low": [low for low, _ in seeds],
        "seed_high": [high for _, high in seeds],
        "choice": [row.choice for row in rows],
        "position": [row.position for row in rows],
        "feedback_slots": [row.feedback_slot for row in rows],
        "bias": -np.inf,
        "bias_rows": [row for row, _ in suppressed],
        "bias_ids": [token_id for _, token_id in suppressed],
    }
