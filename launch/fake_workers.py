"""FakeWorkers: a gateway's channel with one decode worker behind it that needs no time: to measure the gateway alone.

What it says goes through the real codec, one message a step with a token for each request, as a decode worker sends it.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from ..core.messages import (
    AbortRequest,
    CacheSnapshot,
    GenerateRequest,
    Hello,
    Message,
    NodeRef,
    Role,
    TokenChunk,
    TokenChunks,
    WorkerInfo,
)
from ..core.request import FinishReason
from ..transfer.wire import Incoming, decode, encode

_BLOCK_SIZE = 16


class _Answer(msgspec.Struct):
    """What is told of a request: from token number `position` on."""

    request_id: str
    position: int
    max_tokens: int


class FakeWorkers:
    """Every answer is the first `max_tokens` tokens of `answer`. `num_ahead`: steps that are there before the gateway's
    other tasks have their turn; 1 is a worker that is exactly as fast as the gateway.
    """

    def __init__(self, gateway: NodeRef, answer: Sequence[int], max_running: int, num_ahead: int):
        self._gateway = gateway
        self._answer = list(answer)
        self._num_ahead = num_ahead
        self._ref = NodeRef("decode-0", 1)
        self._live: dict[str, _Answer] = {}  # by request
        self._arrived = asyncio.Event()
        self._inbox: deque[Incoming] = deque()
        self.disconnected = asyncio.Event()
        self._say(Hello(self._info(max_running)))
        self._say(CacheSnapshot(0, []))

    def _info(self, max_running: int) -> WorkerInfo:
        context_length = 4 * len(self._answer) + 1024
        return WorkerInfo(
            ref=self._ref,
            roles=(Role.DECODE,),
            pid=0,
            device="none",
            model="fake",
            model_digest="fake",
            wire_digest="fake",
            host_digest="fake",
            endpoints=(),
            block_size=_BLOCK_SIZE,
            num_blocks=max_running * -(-context_length // _BLOCK_SIZE),
            context_length=context_length,
            max_running=max_running,
            threads=1,
        )

    async def receive(self) -> Incoming:
        """The next message, after the other tasks have had their turn where nothing is left to take."""
        while not self._inbox:
            await asyncio.sleep(0)
            while not self._live:
                self._arrived.clear()
                if self._inbox:
                    break
                await self._arrived.wait()
            for _ in range(self._num_ahead if self._live else 0):
                self._step()
        return self._inbox.popleft()

    def send(self, to: NodeRef, body: Message) -> None:
        match body:
            case GenerateRequest(request=request):
                position = len(request.output_token_ids)
                self._live[request.request_id] = _Answer(request.request_id, position, request.sampling.max_tokens)
            case AbortRequest(request_id=request_id):
                self._live.pop(request_id, None)
        self._arrived.set()

    def forget(self, ref: NodeRef) -> None:
        self._live.clear()

    def _step(self) -> None:
        """One token for each request there is."""
        chunks = [self._next_token(answer) for answer in list(self._live.values())]
        if chunks:
            self._say(TokenChunks(chunks))

    def _next_token(self, answer: "_Answer") -> TokenChunk:
        index = answer.position
        answer.position = index + 1
        token_ids = [self._answer[index % len(self._answer)]]
        if index and answer.position < answer.max_tokens:
            return TokenChunk(answer.request_id, 0, index, token_ids)
        reason = None
        if answer.position == answer.max_tokens:
            reason = FinishReason.LENGTH
            del self._live[answer.request_id]
        return TokenChunk(answer.request_id, 0, index, token_ids, reason, num_cached_tokens=None if index else 0)

    def _say(self, body: Message) -> None:
        envelope = decode(encode(self._ref, self._gateway.incarnation, body), self._gateway)
        assert envelope is not None
        self._inbox.append(Incoming(envelope.sender, envelope.body))
