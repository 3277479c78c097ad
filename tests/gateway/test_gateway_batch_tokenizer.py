"""Tokenising off the event loop: what arrives meanwhile forms the next batch."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from baton.gateway.batch_tokenizer import BatchTokenizer


class SlowTokenizer:
    """Lets a batch through when the test opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.batches: list[list[str]] = []

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        self.batches.append(list(texts))
        assert self.gate.acquire(timeout=10)
        if "bad" in texts:
            raise ValueError("no tokens for this")
        return [[len(text), int(add_special_tokens)] for text in texts]


def test_batches_form_while_one_runs() -> None:
    async def main() -> None:
        tokenizer = SlowTokenizer()
        batch = BatchTokenizer(tokenizer)
        first = asyncio.create_task(batch.encode(["a"]))
        while not tokenizer.batches:
            await asyncio.sleep(0.001)
        later = [asyncio.create_task(batch.encode(["b" * n, "c" * n])) for n in (2, 3)]
        left = asyncio.create_task(batch.encode(["d"]))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        tokenizer.gate.release(9)
        assert await first == [[1, 0]]
        assert await asyncio.gather(*later) == [[[2, 0], [2, 0]], [[3, 0], [3, 0]]]
        assert tokenizer.batches == [["a"], ["bb", "cc", "bbb", "ccc"]]
        assert await batch.encode(["e"], add_special_tokens=True) == [[1, 1]]
        batch.close()

    asyncio.run(main())


def test_an_error_reaches_who_waits_and_the_next_batch_runs() -> None:
    async def main() -> None:
        tokenizer = SlowTokenizer()
        tokenizer.gate.release(9)
        batch = BatchTokenizer(tokenizer)
        with pytest.raises(ValueError, match="no tokens"):
            await batch.encode(["bad"])
        assert await batch.encode(["good"]) == [[4, 0]]
        batch.close()

    asyncio.run(main())
