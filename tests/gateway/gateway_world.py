"""A whole gateway in this process, real HTTP included, over a channel of fake workers that do what a test says."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from baton.core.config import GatewayConfig
from baton.core.ledger import Ledger
from baton.core.messages import (
    AbortRequest,
    CacheSnapshot,
    CacheSnapshotQuery,
    FlushCache,
    Flushed,
    GenerateRequest,
    Goodbye,
    Hello,
    LedgerQuery,
    LedgerReport,
    Message,
    NodeRef,
    PrefillRequest,
    RequestFailed,
    Role,
    TokenChunk,
    WorkerInfo,
)
from baton.core.request import FinishReason, TokenLogprobs
from baton.core.timeline import Station, Timeline
from baton.gateway.app import serving
from baton.gateway.gateway import Gateway
from baton.transfer.wire import Incoming, PeerUnreachable

MODEL = "tiny-llama"
BOUND_S = 10.0


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait for a condition, never longer than BOUND_S."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {BOUND_S} s"
        await asyncio.sleep(0.001)


def worker_info(node_id: str, *roles: Role, incarnation: int = 1, **changes: Any) -> WorkerInfo:
    info = WorkerInfo(
        ref=NodeRef(node_id, incarnation),
        roles=roles,
        pid=1,
        device="cpu",
        model=MODEL,
        model_digest="digest",
        wire_digest="wire",
        host_digest="host",
        endpoints=("ipc://nowhere",),
        block_size=16,
        num_blocks=256,
        context_length=1024,
        max_running=64,
        threads=1,
    )
    return msgspec.structs.replace(info, **changes)


class FakeChannel:
    """Same contract as GatewayChannel; delivers at once."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Incoming] = asyncio.Queue()
        self.workers: dict[NodeRef, FakeWorker] = {}
        self.disconnected = asyncio.Event()

    async def receive(self) -> Incoming:
        return await self.inbox.get()

    def send(self, to: NodeRef, body: Message) -> None:
        worker = self.workers.get(to)
        if worker is None or worker.unreachable:
            raise PeerUnreachable(f"{to.node_id} is not there")
        worker.deliver(body)

    def forget(self, ref: NodeRef) -> None:
        self.workers.pop(ref, None)


@dataclass
class FakeWorker:
    """Answers every prompt with the tokens of `answer`; at once, or when the test says so (`auto` False).

    Choice k leaves out the first k tokens. Log-probabilities are those of `fake_logprobs`.
    """

    channel: FakeChannel
    info: WorkerInfo
    answer: list[int]
    auto: bool = True
    chunk_size: int = 3
    cached_tokens: int = 0
    unreachable: bool = False
    answers_queries: bool = True
    hands_over: bool = True  # False: decode says that it had to compute the prompt itself
    received: list[Message] = field(default_factory=list)
    live: dict[str, GenerateRequest] = field(default_factory=dict)
    sent: dict[tuple[str, int], int] = field(default_factory=dict)  # (id, choice) of what has not ended

    @property
    def ref(self) -> NodeRef:
        return self.info.ref

    def of(self, kind: type) -> list[Any]:
        """Messages of one type, without those of probes."""
        return [m for m in self.received if isinstance(m, kind) and not is_probe(m)]

    def join(self) -> None:
        self.channel.workers[self.ref] = self
        self.say(Hello(self.info))
        self.say(CacheSnapshot(0, []))

    def leave(self) -> None:
        self.say(Goodbye())

    def die(self) -> None:
        """As a killed process: unreachable, and silent."""
        self.unreachable = True
        self.live.clear()
        self.channel.disconnected.set()
        self.sent.clear()

    def say(self, body: Message) -> None:
        self.channel.inbox.put_nowait(Incoming(self.ref, body))

    def deliver(self, body: Message) -> None:
        self.received.append(body)
        match body:
            case GenerateRequest(request=request):
                self.live[request.request_id] = body
                for choice in request.choices:
                    self.sent[request.request_id, choice] = len(request.output_token_ids)
                if self.auto or is_probe(body):
                    self.finish(request.request_id)
            case AbortRequest(request_id=request_id, choice=choice):
                for key in [key for key in self.sent if key[0] == request_id and choice in (None, key[1])]:
                    self._end(key)
            case LedgerQuery(query_id=query_id) if self.answers_queries:
                n = len(self.live)
                self.say(LedgerReport(query_id, Ledger(256, 256 - n, 0, n, 0, 0, 0, n, 0, 0, 0)))
            case FlushCache(query_id=query_id) if self.answers_queries:
                self.say(Flushed(query_id, 7))
            case CacheSnapshotQuery():
                self.say(CacheSnapshot(0, []))

    @property
    def request_id(self) -> str:
        """The one request that is not a probe's."""
        (request_id,) = [r for r, message in self.live.items() if not is_probe(message)]
        return request_id

    def emit(self, request_id: str, count: int, *, index: int | None = None, choice: int | None = None) -> None:
        """The next `count` tokens of the answer, or `count` from `index` again; of one choice, or of all."""
        for key in [key for key in self.sent if key[0] == request_id and choice in (None, key[1])]:
            self._emit(key, count, index)

    def _emit(self, key: tuple[str, int], count: int, index: int | None) -> None:
        request_id, choice = key
        start = self.sent[key] if index is None else index
        request = self.live[request_id].request
        tokens = self._whole_answer(request_id, choice)
        stop = min(start + count, len(tokens))
        self.sent[key] = max(stop, self.sent[key])
        first = start == len(request.output_token_ids)
        reason = None
        if stop == len(tokens):
            ended = tokens and tokens[-1] in request.sampling.stop_token_ids
            reason = FinishReason.STOP if ended else FinishReason.LENGTH
            self._end(key)
        chunk = TokenChunk(request_id, choice, start, tokens[start:stop], reason)
        if request.sampling.num_logprobs is not None:
            scores = [fake_logprobs(token_id, request.sampling.num_logprobs) for token_id in chunk.token_ids]
            chunk = msgspec.structs.replace(chunk, logprobs=scores)
        if first:
            timeline = worker_timeline(self.hands_over)
            chunk = msgspec.structs.replace(chunk, num_cached_tokens=self.cached_tokens, timeline=timeline)
        if first and request.num_prompt_logprobs is not None and choice == request.choices[0]:
            of_prompt = [fake_logprobs(i, request.num_prompt_logprobs) for i in request.prompt_token_ids[1:]]
            chunk = msgspec.structs.replace(chunk, prompt_logprobs=of_prompt)
        self.say(chunk)

    def _end(self, key: tuple[str, int]) -> None:
        del self.sent[key]
        if not any(request_id == key[0] for request_id, _ in self.sent):
            self.live.pop(key[0], None)

    def finish(self, request_id: str) -> None:
        while request_id in self.live:
            self.emit(request_id, self.chunk_size)

    def refuse(self, request_id: str, message: str, *, retryable: bool) -> None:
        for key in [key for key in self.sent if key[0] == request_id]:
            self._end(key)
        self.say(RequestFailed(request_id, message, retryable))

    def _whole_answer(self, request_id: str, choice: int) -> list[int]:
        sampling = self.live[request_id].request.sampling
        tokens = [*self.answer[choice:], *self.answer][: sampling.max_tokens]
        for position, token_id in enumerate(tokens):
            if token_id in sampling.stop_token_ids:
                return tokens[: position + 1]
        return tokens


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Token n has log-probability -n/100; the likeliest at its place are it, n + 1, n + 2 ..."""
    return TokenLogprobs(-token_id / 100, tuple((token_id + i, -(token_id + i) / 100) for i in range(num_top)))


def is_probe(message: Message) -> bool:
    match message:
        case GenerateRequest(request=request):
            return request.namespace == "probe"
        case PrefillRequest(namespace=namespace):
            return namespace == "probe"
    return False


def worker_timeline(hands_over: bool) -> Timeline:
    timeline = Timeline(copy_ns=1_000_000, message_ns=500_000) if hands_over else Timeline()
    for station in (
        Station.PREFILL_ARRIVED,
        Station.PREFILL_STARTED,
        Station.PREFILL_COMPUTED,
        Station.HANDED_OVER,
        Station.FIRST_TOKEN,
    ):
        timeline = timeline.stamped(station)
    return timeline


@dataclass
class World:
    gateway: Gateway
    channel: FakeChannel
    http: aiohttp.ClientSession
    url: str
    answer: list[int]

    def worker(self, node_id: str, *roles: Role, **options: Any) -> FakeWorker:
        """A worker that has said Hello. Options of FakeWorker, and fields of WorkerInfo."""
        names = ("auto", "chunk_size", "cached_tokens", "answers_queries", "hands_over")
        own = {name: options.pop(name) for name in names if name in options}
        answer = options.pop("answer", self.answer)
        worker = FakeWorker(self.channel, worker_info(node_id, *roles, **options), answer, **own)
        worker.join()
        return worker

    async def pair(self, **options: Any) -> tuple[FakeWorker, FakeWorker]:
        """A prefill and a decode worker, both in the table."""
        prefill = self.worker("prefill-0", Role.PREFILL)
        decode = self.worker("decode-0", Role.DECODE, **options)
        await until(lambda: len(self.gateway.membership.workers) == 2, "both have joined")
        return prefill, decode

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.http.post(self.url + path, json=body, **options)

    async def answer_to(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.post(path, body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    @property
    def is_empty(self) -> bool:
        dispatcher = self.gateway.dispatcher
        return dispatcher.num_in_flight == dispatcher.num_queued == 0


@asynccontextmanager
async def open_world(folder: Path, answer: list[int], /, **changes: Any) -> AsyncIterator[World]:
    settings: dict[str, Any] = {
        "gateway_id": "gateway-0",
        "served_model": MODEL,
        "model_folder": str(folder),
        "model_digest": "digest",
        "host": "127.0.0.1",
        "port": 0,
        "bind": (),
        "key_file": "",
        "expected_prefill": 1,
        "expected_decode": 1,
        "worker_timeout_s": 1000.0,
    }
    config = GatewayConfig(**settings | changes)
    channel = FakeChannel()
    gateway = Gateway(config, NodeRef("gateway-0", 9), channel)
    async with serving(gateway) as server, aiohttp.ClientSession() as http:
        yield World(gateway, channel, http, f"http://127.0.0.1:{server.port}", answer)


def sse_events(raw: bytes) -> list[str]:
    """The data of each event; comments start with a colon."""
    events = raw.decode().split("\n\n")
    assert events[-1] == ""
    return [event.removeprefix("data: ") for event in events[:-1]]


def sse_chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON chunks of a stream that ended well."""
    events = [event for event in sse_events(raw) if not event.startswith(":")]
    assert events[-1] == "[DONE]"
    return [msgspec.json.decode(event) for event in events[:-1]]
