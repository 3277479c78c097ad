"""A model made by hand, and a device that works behind its host's back.

The model can be computed on paper: a token's key and value are the token itself, and the next token is a function of
all tokens *as read from the KV pool through the block table*. A wrong block, a stray write or a token handed over to
the wrong place gives a wrong token.

The device takes work in order and does it when it likes: at the latest when the host waits for it, sometimes when the
host looks. Copies of hand-overs are not in that order; they happen at once, as on a stream of their own.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from baton.core.counted_random import gumbel
from baton.core.request import TokenLogprobs
from baton.engine.feedback import NUM_FEEDBACK_SLOTS
from baton.engine.kv_cache_pool import KVCachePool
from baton.engine.launched import KnownTokens
from baton.engine.sampler import HostSampler, SamplingRow

VOCAB_SIZE = 101
MODULUS = 8191
EOS = 100


def digest(token_ids) -> int:
    return sum((i + 1) * (token + 1) for i, token in enumerate(token_ids)) % MODULUS


def oracle(prompt: list[int], num_tokens: int) -> list[int]:
    """What the hand-made model generates."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(digest(token_ids) % VOCAB_SIZE)
    return token_ids[len(prompt) :]


def sampled_oracle(prompt: list[int], num_tokens: int, seed: int, choice: int) -> list[int]:
    """The same at temperature 1: the one logit that is not 0 is 1."""
    token_ids = list(prompt)
    for position in range(len(prompt), len(prompt) + num_tokens):
        scores = list(noise(seed, choice, position))
        scores[digest(token_ids) % VOCAB_SIZE] += 1.0
        token_ids.append(scores.index(max(scores)))
    return token_ids[len(prompt) :]


@cache
def noise(seed: int, choice: int, position: int) -> tuple[float, ...]:
    return tuple(gumbel(seed, choice, position, token_id) for token_id in range(VOCAB_SIZE))


def output_name(request_id: str, choice: int) -> str:
    """What the test calls a choice of a request."""
    return f"{request_id}#{choice}" if choice else request_id


@dataclass
class Device:
    """Work in order of its launch, done late. `overlaps` false: done at once, like a CPU."""

    overlaps: bool
    random: random.Random
    holds: bool = False  # works only when it is waited for
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    num_launched: int = 0

    def launch(self, work: Callable[[], None]) -> int:
        """Returns a number for `wait_for`."""
        self.queue.append(work)
        self.num_launched += 1
        if not self.overlaps:
            self.wait_for(self.num_launched)
        return self.num_launched

    @property
    def num_done(self) -> int:
        return self.num_launched - len(self.queue)

    def wait_for(self, number: int) -> None:
        while self.num_done < number:
            self.queue.popleft()()

    def has_done(self, number: int) -> bool:
        while self.queue and not self.holds and self.random.random() < 0.5:
            self.queue.popleft()()
        return self.num_done >= number


@dataclass
class Progress:
    """LayerProgress of a one-layer model."""

    device: Device
    number: int

    def layers_done(self) -> int:
        return int(self.is_done())

    def is_done(self) -> bool:
        return self.device.has_done(self.number)

    def wait(self) -> None:
        self.device.wait_for(self.number)


@dataclass
class Later:
    """A tensor that the device is computing."""

    value: torch.Tensor | None = None

    def __getitem__(self, rows: slice | list[int]) -> "LaterRows":
        return LaterRows(self, rows)


@dataclass
class LaterRows:
    """Some rows of it."""

    whole: Later
    rows: slice | list[int]

    @property
    def value(self) -> torch.Tensor | None:
        return None if self.whole.value is None else self.whole.value[self.rows]

    __getitem__ = Later.__getitem__


class HandMadeRunner:
    """ModelRunner's interface over a one-layer, one-head pool of width one."""

    def __init__(self, pool: KVCachePool, block_size: int, device: Device, feedback: dict[int, int]):
        self._layer = pool.layer(0)  # [num_blocks, 2, 1, block_size, 1]
        self._block_size = block_size
        self.device = device
        self._feedback = feedback
        self.num_tokens_computed = 0
        self.num_steps = 0
        self.progress = Progress(device, 0)

    def forward(self, batch) -> Later:
        result = Later()

        def work() -> None:
            result.value = self._compute(batch)

        self.progress = Progress(self.device, self.device.launch(work))
        self.num_tokens_computed += batch.num_tokens
        self.num_steps += 1
        return result

    def _compute(self, batch) -> torch.Tensor:
        input_ids = batch.input_ids.tolist()
        for i, slot in enumerate(batch.feedback_slots.tolist()):
            if slot >= 0:
                input_ids[i] = self._feedback[slot]
        hidden = []
        for i, table in enumerate(batch.block_tables):
            rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
            for slot, token in zip(batch.slot_mapping[rows].tolist(), input_ids[rows], strict=True):
                self._layer[slot // self._block_size, :, 0, slot % self._block_size, 0] = float(token)
            context = [
                int(self._layer[int(table[t // self._block_size]), 0, 0, t % self._block_size, 0])
                for t in range(batch.context_lens[i])
            ]
            hidden += [context[: len(context) - behind] for behind in reversed(range(rows.stop - rows.start))]
        wanted = [float(digest(hidden[row])) for row in batch.output_rows.tolist()]
        return torch.tensor(wanted).reshape(-1, 1)

    def logits(self, hidden: Later | LaterRows | torch.Tensor) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            value = hidden if isinstance(hidden, torch.Tensor) else hidden.value
            assert value is not None
            logits = torch.zeros(len(value), VOCAB_SIZE)
            logits[torch.arange(len(value)), value[:, 0].long() % VOCAB_SIZE] = 1.0
            return logits

        return compute

    def to_host(self, hidden: Later | LaterRows) -> np.ndarray:
        self.device.wait_for(self.progress.number)
        assert hidden.value is not None
        return hidden.value.numpy()


@dataclass
class Arriving:
    """LaunchedTokens and LaunchedLogprobs of a device, once that has filled `results`."""

    device: Device
    number: int
    results: list

    def is_done(self) -> bool:
        return self.device.has_done(self.number)

    def token_ids(self) -> list[int | None]:
        self.device.wait_for(self.number)
        return self.results[0].token_ids()

    def logprobs(self) -> dict[int, TokenLogprobs]:
        self.device.wait_for(self.number)
        return self.results[0].logprobs()

    def read(self) -> list[TokenLogprobs]:
        self.device.wait_for(self.number)
        return self.results[0].read()


class HandMadeSampler:
    """The real sampler, run when the device comes to it; what it chose is fed back there."""

    def __init__(self, device: Device, feedback: dict[int, int]):
        self._device = device
        self._feedback = feedback

    def launch(self, logits: Callable[[], torch.Tensor], rows: list[SamplingRow]) -> Arriving:
        tokens: list[KnownTokens] = []

        def work() -> None:
            tokens.append(self.sample(logits(), rows))
            for row, token in zip(rows, tokens[0].token_ids(), strict=True):
                if row.feedback_slot >= 0:
                    self._feedback[row.feedback_slot] = token or 0

        return Arriving(self._device, self._device.launch(work), tokens)

    def score(self, logits: Callable[[], torch.Tensor], token_ids: list[int], num_top: int) -> Arriving:
        scores: list = []
        sampler = HostSampler(torch.zeros(0))
        number = self._device.launch(lambda: scores.append(sampler.score(logits(), token_ids, num_top)))
        return Arriving(self._device, number, scores)

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow]) -> KnownTokens:
        """A test may put something in front of it."""
        return HostSampler(torch.zeros(NUM_FEEDBACK_SLOTS, dtype=torch.int64)).launch(logits, rows)
