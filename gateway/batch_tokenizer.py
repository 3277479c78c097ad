"""BatchTokenizer: text to token ids off the event loop; what arrives while a batch runs forms the next batch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

_T = TypeVar("_T")


class BatchEncoder(Protocol):
    """The one call of vocab's Tokenizer that is used here."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]: ...


class _Job(NamedTuple):
    texts: tuple[str, ...]
    add_special_tokens: bool
    done: "asyncio.Future[list[list[int]]]"


class BatchTokenizer:
    """One worker thread; one call into the tokenizer for everything that waits (the call is parallel inside).

    Texts must be valid Unicode (the JSON decoder sees to that), for one bad text fails the batch it is in.
    """

    def __init__(self, tokenizer: BatchEncoder):
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._waiting: list[_Job] = []
        self._running: asyncio.Task[None] | None = None

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of each text."""
        job = _Job(tuple(texts), add_special_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await job.done

    async def call(self, function: Callable[[], _T]) -> _T:
        """Runs other work that takes long (a chat template) on the same thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            batch = [job for job in batch if not job.done.cancelled()]
            for special in (False, True):
                await self._encode([job for job in batch if job.add_special_tokens is special], special)
        self._running = None

    async def _encode(self, jobs: list[_Job], add_special_tokens: bool) -> None:
        if not jobs:
            return
        texts = [text for job in jobs for text in job.texts]
        try:
            ids = iter(await self.call(lambda: self._tokenizer.encode_batch(texts, add_special_tokens)))
        except Exception as error:  # handed to those who wait; the loop goes on with the next batch
            for job in jobs:
                if not job.done.cancelled():
                    job.done.set_exception(error)
            return
        for job in jobs:
            result = [next(ids) for _ in job.texts]
            if not job.done.cancelled():
                job.done.set_result(result)
