"""Grammars: whether a grammar of a request can be used, asked of a process of its own (vocab/grammar_checker.py).

Compiling never runs in the gateway, so no schema can hold up other clients; one that passed once is not asked about
again. The process starts with the first grammar, or earlier with `start_soon`.
"""

import asyncio
import logging
import sys
from collections import OrderedDict

import msgspec

from ..core.errors import RequestError
from ..vocab.grammar_checker import CheckerConfig
from .generation import Unavailable

COMPILE_LIMIT_S = 0.6  # of a processor; 2000 properties take 0.5, and a refusal has to come within a second
_START_LIMIT_S = 60.0
_WAIT_LIMIT_S = 10.0  # for the grammars before this one
_ANSWER_LIMIT_S = 10.0  # beyond the compile limit: the checker itself is stuck
_MOST_KNOWN = 1024
_MOST_WAITING = 64
_FAILURES = (OSError, TimeoutError, msgspec.DecodeError)  # of the process: it is ended then

logger = logging.getLogger(__name__)


class Grammars:
    """One checker process for one model; `close` must be awaited: it ends it."""

    def __init__(self, model_folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._config = CheckerConfig(model_folder, vocab_size, list(eos_token_ids), COMPILE_LIMIT_S)
        self._known: OrderedDict[str, str | None] = OrderedDict()  # grammar |-> what is wrong with it
        self._asking: dict[str, asyncio.Task[str | None]] = {}
        self._turn = asyncio.Lock()
        self._unusable: str | None = None  # why this model can have no grammars
        self._starting: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start_soon(self) -> None:
        """Loads the tokenizer in the background, so that the first grammar need not wait for it."""
        self._starting = asyncio.create_task(self._start())

    async def check(self, grammar: str, param: str) -> None:
        """Raises RequestError (400) naming `param` when the grammar cannot be used, Unavailable (503) when that cannot
        be found out now.
        """
        if grammar in self._known:
            self._known.move_to_end(grammar)
            error = self._known[grammar]
        else:
            if (asking := self._asking.get(grammar)) is None:
                asking = self._asking[grammar] = asyncio.create_task(self._ask(grammar))
                asking.add_done_callback(self._asked)
            # A client that leaves in between must not cut an exchange with the process short.
            error = await asyncio.shield(asking)
        if error is not None:
            raise RequestError(f"{param} cannot be enforced: {error}", param)

    async def close(self) -> None:
        for task in (self._starting, *self._asking.values()):
            if task is not None:
                task.cancel()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.communicate()  # waits for its end, and closes the pipes

    async def _start(self) -> None:
        async with self._turn:
            try:
                await self._running()
            except _FAILURES as failure:
                await self._end_process()
                logger.error("the grammar checker did not start: %r", failure)

    async def _ask(self, grammar: str) -> str | None:
        if len(self._asking) > _MOST_WAITING:
            raise Unavailable("too many grammars wait to be compiled; try again", retry_after=1)
        try:
            async with asyncio.timeout(_WAIT_LIMIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable("other grammars take long to compile; try again", retry_after=1) from None
        try:
            process = await self._running()
            error = self._unusable or await _exchange(process, grammar, COMPILE_LIMIT_S + _ANSWER_LIMIT_S)
        except _FAILURES as failure:
            await self._end_process()
            logger.error("a grammar could not be checked: %r", failure)
            raise Unavailable("grammars cannot be checked now; try again", retry_after=1) from None
        finally:
            self._turn.release()
        self._known[grammar] = error
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return error

    def _asked(self, asking: "asyncio.Task[str | None]") -> None:
        self._asking = {grammar: task for grammar, task in self._asking.items() if task is not asking}
        if not asking.cancelled():
            asking.exception()  # whoever asked may have left

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            await self._end_process()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "baton.vocab.grammar_checker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the gateway; this ends with its input
            )
            self._unusable = await _exchange(self._process, self._config, _START_LIMIT_S)
        return self._process


async def _exchange(process: asyncio.subprocess.Process, question: object, limit_s: float) -> str | None:
    """One line of JSON each way."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(question) + b"\n")
    async with asyncio.timeout(limit_s):
        await process.stdin.drain()
        answer = await process.stdout.readline()
    return msgspec.json.decode(answer, type=str | None)
