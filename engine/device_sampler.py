"""DeviceSampler: the sampler's rules on the device, whose tokens the host need not know to go on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.gpu.logprobs import token_logprobs
from ..kernels.gpu.penalties import add_bias, apply_penalties, keep_allowed
from ..kernels.gpu.sampling import sample
from ..kernels.gpu.sampling_tensors import SamplingTensors
from .launched import ArrivingTokens, AskedLogprobs, LaunchedLogprobs, record_event
from .logit_changes import bias_arrays
from .philox import seed_words
from .sampler import SamplingRow, check_rows, num_top_of
from .upload import Field, Packing, Upload

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_INTEGERS = ("top_k", "seed_low", "seed_high", "choice", "position", "feedback_slots")
_INITIAL_BYTES = 1 << 16


class DeviceSampler:
    """Sampler of the Triton kernels; `feedback` `[slots]` int64 is what the next steps read."""

    def __init__(self, feedback: Tensor):
        self._feedback = feedback
        self._device = feedback.device
        self._upload = Upload(self._device, _INITIAL_BYTES)

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> ArrivingTokens:
        check_rows(logits, rows)
        vocab_size = logits.shape[1]
        changes = _changes(rows, vocab_size)
        asked = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
        lists = {**changes, "asked": np.array(asked, np.int64)}
        fields = [
            *(Field(name, np.float64, (len(rows),)) for name in _FLOATS),
            *(Field(name, np.int64, (len(rows),)) for name in _INTEGERS),
            *(Field(name, array.dtype.type, array.shape) for name, array in lists.items()),
        ]
        packing = Packing(fields)
        on_device = packing.tensors(self._upload.send(packing, {**_rules(rows), **lists}))
        changed = _changed(logits, on_device) if any(map(len, changes.values())) else logits
        token_ids = sample(changed, _sampling_tensors(rows, on_device), self._feedback, on_device["feedback_slots"])
        logprobs = None
        if asked:
            num_top = [num_top_of(rows[i], vocab_size) for i in asked]
            scores = token_logprobs(logits, on_device["asked"], token_ids, max(num_top))
            logprobs = AskedLogprobs(asked, self._arriving(scores, num_top))
        return ArrivingTokens(self._to_host(token_ids), record_event(self._device), logprobs)

    @torch.inference_mode()
    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> LaunchedLogprobs:
        check_rows(logits, token_ids)
        count, num_top = len(token_ids), min(num_top, logits.shape[1])
        packing = Packing([Field(name, np.int64, (count,)) for name in ("rows", "token_ids")])
        values = {"rows": np.arange(count), "token_ids": token_ids}
        on_device = packing.tensors(self._upload.send(packing, values))
        scores = token_logprobs(logits, on_device["rows"], on_device["token_ids"], num_top)
        return self._arriving(scores, [num_top] * count)

    def _arriving(self, scores: tuple[Tensor, Tensor, Tensor], num_top: list[int]) -> LaunchedLogprobs:
        chosen, top, top_ids = map(self._to_host, scores)
        return LaunchedLogprobs(chosen, top, top_ids, num_top, record_event(self._device))

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy that is complete once the device has come so far."""
        arriving = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return arriving.copy_(tensor, non_blocking=True)


def _changed(logits: Tensor, on_device: dict[str, Tensor]) -> Tensor:
    """A copy of the logits with all changes; the log-probabilities are of those that stay as they are."""
    logits = logits.clone()
    rules = (on_device["repetition"], on_device["presence"], on_device["frequency"])
    apply_penalties(logits, on_device["count_rows"], on_device["count_ids"], on_device["counts"], *rules)
    add_bias(logits, on_device["bias_rows"], on_device["bias_ids"], on_device["bias"])
    keep_allowed(logits, on_device["allowed_rows"], on_device["allowed"])
    return logits


def _sampling_tensors(rows: Sequence[SamplingRow], on_device: dict[str, Tensor]) -> SamplingTensors:
    drawn = [row for row in rows if not row.greedy]
    return SamplingTensors(
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


def _changes(rows: Sequence[SamplingRow], vocab_size: int) -> dict[str, NDArray[np.generic]]:
    """What changes the logits, as entries (row, token, number), and the bit masks of the rows that have one."""
    counts = [(i, row.counts.token_ids, row.counts.counts) for i, row in enumerate(rows) if row.counts is not None]
    biased = [
        (i, *bias_arrays(row.params.logit_bias, row.suppress, vocab_size))
        for i, row in enumerate(rows)
        if row.suppress or row.params.logit_bias
    ]
    masks = {i: row.allowed for i, row in enumerate(rows) if row.allowed is not None}
    count_rows, count_ids, numbers = _entries(counts, np.int64)
    bias_rows, bias_ids, bias = _entries(biased, np.float64)
    return {
        "count_rows": count_rows,
        "count_ids": count_ids,
        "counts": numbers,
        "bias_rows": bias_rows,
        "bias_ids": bias_ids,
        "bias": bias,
        "allowed_rows": np.array(list(masks), np.int64),
        "allowed": np.stack(list(masks.values())) if masks else np.empty((0, -(-vocab_size // 32)), np.int32),
    }


def _entries(
    of_rows: Sequence[tuple[int, NDArray[np.int64], NDArray[np.generic]]], dtype: type[np.generic]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.generic]]:
    """Rows, ids and numbers of all entries, one row's behind the other's."""
    if not of_rows:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, dtype)
    rows = np.repeat([row for row, _, _ in of_rows], [len(ids) for _, ids, _ in of_rows])
    return rows, np.concatenate([ids for _, ids, _ in of_rows]), np.concatenate([numbers for _, _, numbers in of_rows])


def _rules(rows: Sequence[SamplingRow]) -> dict[str, object]:
    seeds = [seed_words(row.params.seed) for row in rows]
    return {
        "temperature": [row.params.temperature for row in rows],
        "top_p": [row.params.top_p for row in rows],
        "min_p": [row.params.min_p for row in rows],
        "repetition": [row.params.repetition_penalty for row in rows],
        "presence": [row.params.presence_penalty for row in rows],
        "frequency": [row.params.frequency_penalty for row in rows],
        "top_k": [row.params.top_k for row in rows],
        "seed_low": [low for low, _ in seeds],
        "seed_high": [high for _, high in seeds],
        "choice": [row.choice for row in rows],
        "position": [row.position for row in rows],
        "feedback_slots": [row.feedback_slot for row in rows],
    }
