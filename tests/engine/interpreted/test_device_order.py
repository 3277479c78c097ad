"""What the host must not hear before it is so, and what must not be said to be over before it is waited for.

On a GPU these mistakes give old tokens and torn pieces now and then; here each is looked for at the moment it is made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.layout import BlockLayout
from baton.core.request import SamplingParams
from baton.engine import device_kv_cache_pool, device_sampler, model_runner
from baton.engine.device_kv_cache_pool import DeviceKVCachePool
from baton.engine.device_sampler import DeviceSampler
from baton.engine.engine import Engine
from baton.engine.feedback import make_feedback
from baton.engine.forward_batch import build_forward_batch
from baton.engine.launched import record_event
from baton.engine.sampler import SamplingRow

CPU = torch.device("cpu")


def test_the_event_of_tokens_stands_behind_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    arriving: list[torch.Tensor] = []
    at_event: list[list[int]] = []
    empty = torch.empty

    def watched_empty(*sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        if "pin_memory" in options:
            arriving.append(made.fill_(-7))
        return made

    def watched_event(device: torch.device) -> Any:
        at_event.append(arriving[-1].tolist())
        return record_event(device)

    sampler = DeviceSampler(make_feedback(CPU))
    monkeypatch.setattr(torch, "empty", watched_empty)
    monkeypatch.setattr(device_sampler, "record_event", watched_event)
    logits = torch.zeros((2, 320))
    logits[0, 5] = logits[1, 300] = 1.0
    rows = [SamplingRow(SamplingParams(temperature=0.0), 0, 1, feedback_slot=slot) for slot in (0, 1)]
    assert sampler.launch(logits, rows).token_ids() == [5, 300]
    assert at_event == [[5, 300]]


class Copies:
    """CopyStream that asks `is_done` when it is told to wait, and knows whether work is given to it."""

    def __init__(self, is_done: Callable[[], bool]):
        self._is_done = is_done
        self.is_current = False
        self.num_waits = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False

    def wait(self) -> None:
        assert not self.is_current
        assert self._is_done()
        self.num_waits += 1


@pytest.mark.parametrize("is_staged", [False, True])
def test_copies_of_pieces_run_on_their_stream_and_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_staged: bool
) -> None:
    pool = DeviceKVCachePool(BlockLayout(1, 1, 4, 4, "float32"), 2, CPU)
    pool.layer(0)[1] = 3.0
    out = torch.zeros(pool.piece_bytes(4), dtype=torch.uint8)
    if is_staged:
        monkeypatch.setattr(pool, "_is_here", lambda buffer: False)
    for name in ("gather_tokens", "scatter_tokens"):
        kernel = getattr(device_kv_cache_pool, name)

        def watched(*arguments: Any, kernel: Any = kernel) -> None:
            assert copies.is_current
            kernel(*arguments)

        monkeypatch.setattr(device_kv_cache_pool, name, watched)

    copies = Copies(lambda: bool((out.view(torch.float32) == 3.0).all()))
    monkeypatch.setattr(pool, "_copies", copies)
    pool.gather([1], 0, 4, out)
    assert copies.num_waits == 1

    copies = Copies(lambda: bool((pool.layer(0)[0] == 3.0).all()))
    monkeypatch.setattr(pool, "_copies", copies)
    pool.scatter([0], 0, 4, out)
    assert copies.num_waits == 1


def test_a_layer_is_said_to_be_done_when_its_keys_and_values_are_stored(
    tiny_qwen3: Path, load: Callable[..., Engine], requests: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is marked is handed over at once."""
    engine = load(tiny_qwen3)  # its pool is poisoned
    (request,) = requests([3])
    stored: list[int] = []

    def watched_event(device: torch.device) -> Any:
        slots = [layer[request.table[0], :, :, :3] for layer in engine.pool.layers]
        stored.append(sum(bool(slot.isfinite().all()) for slot in slots))
        return record_event(device)

    monkeypatch.setattr(model_runner, "record_event", watched_event)
    engine.runner.forward(build_forward_batch([request.chunk(3)], 16))
    assert [layers for layers, _ in engine.runner.progress.marks] == stored == [1, 2]
