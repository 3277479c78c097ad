"""A whole topology in one thread: real workers, roles, caches and hand-overs; model, device and network by hand.

The network is a queue for each (sender, receiver); the test says when the head of which queue arrives.
"""

import importlib.util
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from baton.core.config import EngineConfig, NetworkConfig, SchedulerConfig, TransferConfig, WorkerConfig
from baton.core.layout import BlockLayout
from baton.core.messages import (
    AbortRequest,
    Beat,
    GenerateRequest,
    LedgerQuery,
    LedgerReport,
    Message,
    NodeRef,
    PeerJoined,
    PeerLeft,
    PrefillRequest,
    RequestFailed,
    Role,
    TokenChunk,
    TokenChunks,
    Welcome,
    WorkerInfo,
)
from baton.core.queueing import FCFS, QueuePolicy
from baton.core.request import Request, SamplingParams, TokenLogprobs, Urgency
from baton.decode.role import DecodeRole
from baton.engine.kv_cache_pool import KVCachePool
from baton.prefill.role import PrefillRole
from baton.radix_cache.cache import RadixCache
from baton.transfer.channels import Incoming, PeerUnreachable
from baton.transfer.link import KVLink
from baton.worker.cache_reporter import CacheReporter
from baton.worker.membership import Membership
from baton.worker.role_share import RoleShare
from baton.worker.sequence_blocks import SequenceBlocks
from baton.worker.workbench import Workbench
from baton.worker.worker import Worker


def _load_helper(name: str) -> ModuleType:
    """A plain helper module beside this file (with --import-mode=importlib the tests folder is not importable)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hand_made = _load_helper("hand_made")
NORMAL = Urgency()


@dataclass
class Network:
    """Messages on their way, in order for each (sender, receiver)."""

    queues: dict[tuple[NodeRef, NodeRef], deque] = field(default_factory=dict)
    inboxes: dict[NodeRef, list[Incoming]] = field(default_factory=dict)

    def send(self, sender: NodeRef, to: NodeRef, body, payload=None) -> None:
        if to not in self.inboxes:
            raise PeerUnreachable(f"{to.node_id} is gone")
        self.queues.setdefault((sender, to), deque()).append((body, payload))

    @property
    def pending(self) -> list[tuple[NodeRef, NodeRef]]:
        return [pair for pair, queue in self.queues.items() if queue]

    def deliver(self, pair: tuple[NodeRef, NodeRef]) -> None:
        sender, to = pair
        body, payload = self.queues[pair].popleft()
        if to in self.inboxes:
            self.inboxes[to].append(Incoming(sender, body, None if payload is None else memoryview(payload)))

    def remove(self, ref: NodeRef) -> None:
        del self.inboxes[ref]
        for pair in [p for p in self.queues if ref in p]:
            del self.queues[pair]


class LoopbackChannels:
    """WorkerChannels' interface over a Network."""

    def __init__(self, network: Network, ref: NodeRef, gateway: NodeRef):
        self._network, self._ref, self._gateway = network, ref, gateway
        self._infos: dict[NodeRef, WorkerInfo] = {}
        self.host_digest = f"host of {ref.node_id}"  # all differ: hand-overs go over "TCP"
        self.endpoints = ()
        network.inboxes[ref] = []

    def poll(self, timeout_s: float) -> list[Incoming]:
        messages, self._network.inboxes[self._ref] = self._network.inboxes[self._ref], []
        return messages

    def send(self, to: NodeRef, body, payload=None) -> None:
        self._network.send(self._ref, to, body, payload)

    def broadcast_gateways(self, body) -> None:
        self._network.send(self._ref, self._gateway, body)

    def add_peer(self, info: WorkerInfo) -> None:
        self._infos[info.ref] = info

    def remove_peer(self, ref: NodeRef) -> None:
        self._infos.pop(ref, None)

    def peer_info(self, ref: NodeRef) -> WorkerInfo:
        if ref not in self._infos:
            raise PeerUnreachable(f"{ref.node_id} is not known")
        return self._infos[ref]


class House:
    """A gateway played by the test, and workers that can be born and killed. Time is a number."""

    def __init__(self, seed: int = 0, *, overlaps: bool = False, policy: QueuePolicy = FCFS, **settings: int):
        self.overlaps = overlaps  # the devices of all workers
        self.random = random.Random(seed)
        self.now = 1000.0
        self.network = Network()
        self.gateway = NodeRef("gateway-0", 1)
        self.network.inboxes[self.gateway] = []
        self.workers: dict[NodeRef, Worker] = {}
        self.benches: dict[NodeRef, Workbench] = {}
        self.outputs: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.cached: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.ledgers: dict[NodeRef, object] = {}
        self._incarnation = 1
        self._policy = policy
        self._settings = {"block_size": 4, "num_blocks": 64, "token_budget": 8, "max_running": 8} | settings

    def birth(self, role: Role, **settings: int) -> NodeRef:
        """A worker starts, and gateway and peers get to know it."""
        wanted = self._settings | settings
        self._incarnation += 1
        ref = NodeRef(f"{role}-{settings.get('number', 0)}", self._incarnation)
        layout = BlockLayout(1, 1, 1, wanted["block_size"], "float32")
        scheduler = SchedulerConfig(
            wanted["token_budget"], wanted["token_budget"], wanted["max_running"], policy=self._policy
        )
        transfer = TransferConfig("tcp", ring_slots=3, slot_bytes=5 * layout.bytes_per_token, lease_s=30.0)
        engine_config = EngineConfig("", "cpu", "torch", "float32", wanted["block_size"], wanted["num_blocks"], 1)
        network_config = NetworkConfig("", "127.0.0.1", (), "")
        config = WorkerConfig(
            ref.node_id, (role,), "m", "d", 4096, engine_config, scheduler, scheduler, transfer, network_config
        )
        channels = LoopbackChannels(self.network, ref, self.gateway)
        info = WorkerInfo(
            ref, (role,), 1, "cpu", "m", "d", layout.wire_digest, channels.host_digest, (),
            wanted["block_size"], wanted["num_blocks"], wanted["block_size"] * wanted["num_blocks"],
            wanted["max_running"], 1,
        )  # fmt: skip
        pool = KVCachePool(layout, wanted["num_blocks"])
        pool.layer(0).fill_(-1000.0)  # poisoned: an unwritten slot cannot pass for a token
        device, feedback = hand_made.Device(self.overlaps, self.random), {}
        engine = SimpleNamespace(
            model_config=SimpleNamespace(
                hidden_size=1, vocab_size=hand_made.VOCAB_SIZE, eos_token_ids=(hand_made.EOS,)
            ),
            layout=layout,
            pool=pool,
            overlaps=device.overlaps,
            runner=hand_made.HandMadeRunner(pool, wanted["block_size"], device, feedback),
            sampler=hand_made.HandMadeSampler(device, feedback),
        )
        blocks = SequenceBlocks(RadixCache(wanted["num_blocks"], wanted["block_size"]), wanted["block_size"])
        link = KVLink(channels, pool, layout, transfer, "", info)
        reporter, share = CacheReporter(blocks.cache, channels), RoleShare(wanted["num_blocks"])
        bench = Workbench(config, info, engine, blocks, channels, link, reporter, share)
        membership = Membership()
        roles = {Role.PREFILL: PrefillRole(bench, membership), Role.DECODE: DecodeRole(bench, membership)}
        others = [other.info for other in self.benches.values()]
        self.workers[ref] = Worker(bench, membership, roles, clock=lambda: self.now)
        self.benches[ref] = bench
        self.network.send(self.gateway, ref, Welcome(self.gateway, others))
        for other in others:
            self.network.send(self.gateway, other.ref, PeerJoined(info))
        return ref

    def kill(self, ref: NodeRef) -> None:
        del self.workers[ref], self.benches[ref]
        self.network.remove(ref)
        for other in self.workers:
            self.network.send(self.gateway, other, PeerLeft(ref))

    def generate(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        decode: NodeRef,
        prefill: NodeRef | None,
        returned: int = 0,
        urgency: Urgency = NORMAL,
        choices: tuple[int, ...] = (0,),
        num_prompt_logprobs: int | None = None,
        **sampling,
    ) -> None:
        """What the gateway does with a request: both workers are told at once."""
        for choice in choices:
            done = self.outputs.setdefault(hand_made.output_name(name, choice), [])
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens} | sampling))
        request = Request(name, "n", prompt, params, list(done), urgency, choices, num_prompt_logprobs)
        self.network.send(self.gateway, decode, GenerateRequest(request, prefill, returned))
        if prefill is not None:
            message = PrefillRequest(name, "n", prompt + done, decode, returned, urgency)
            self.network.send(self.gateway, prefill, message)

    def abort(self, name: str, choice: int | None = None) -> None:
        for ref in self.workers:
            self.network.send(self.gateway, ref, AbortRequest(name, "the client left", choice))

    # ---- running ---------------------------------------------------------------------------------------------

    def turn(self, ref: NodeRef) -> None:
        self.workers[ref].turn(0.0)
        self.read()

    def read(self) -> None:
        """The gateway takes what has arrived."""
        messages, self.network.inboxes[self.gateway] = self.network.inboxes[self.gateway], []
        for incoming in messages:
            body = incoming.body
            for message in body.chunks if isinstance(body, TokenChunks) else [body]:
                self.take(incoming.sender, message)

    def take(self, sender: NodeRef, body: Message) -> None:
        match body:
            case TokenChunk() as chunk:
                name = hand_made.output_name(chunk.request_id, chunk.choice)
                output = self.outputs[name]
                assert chunk.index == len(output), "a token was lost or came twice"
                output += chunk.token_ids
                self.logprobs.setdefault(name, []).extend(chunk.logprobs or [])
                if chunk.prompt_logprobs is not None:
                    assert name not in self.prompt_logprobs, "they came twice"
                    self.prompt_logprobs[name] = chunk.prompt_logprobs
                if chunk.num_cached_tokens is not None:
                    self.cached[name] = chunk.num_cached_tokens
                if chunk.finish_reason is not None:
                    assert name not in self.finished, "it ended twice"
                    self.finished[name] = chunk.finish_reason
            case RequestFailed(request_id=request_id, message=message):
                self.failed[request_id] = message
            case LedgerReport(ledger=ledger):
                self.ledgers[sender] = ledger

    def random_step(self) -> None:
        """Deliver a message somewhere or give a worker a turn, in any order."""
        pending = self.network.pending
        if pending and self.random.random() < 0.7:
            self.network.deliver(self.random.choice(pending))
        elif self.workers:
            self.turn(self.random.choice(list(self.workers)))

    def beat(self) -> None:
        """The gateway's sign of life to all."""
        for ref in self.workers:
            self.network.send(self.gateway, ref, Beat(0, 0))

    def settle(self, rounds: int = 3000) -> None:
        """Let everything arrive and everybody work until nothing moves any more."""
        quiet = 0
        for _ in range(rounds):
            while self.network.pending:
                self.network.deliver(self.random.choice(self.network.pending))
            busy = [worker.turn(0.0) for worker in self.workers.values()]
            self.read()
            self.now += 0.01
            quiet = 0 if any(busy) or self.network.pending else quiet + 1
            if quiet > 3 and not any(worker.num_requests for worker in self.workers.values()):
                return
            if quiet > 200:
                self.now += 5.0  # somebody waits for a lease
                self.beat()
        raise AssertionError(f"still busy: {[(r.node_id, w.num_requests) for r, w in self.workers.items()]}")

    def assert_idle(self) -> None:
        for ref, bench in self.benches.items():
            bench.cache.check_integrity()
            ledger = bench.ledger(self.workers[ref].num_requests)
            assert ledger.idle, (ref, ledger)
            decode = self.workers[ref]._roles[Role.DECODE]  # each slot of the device's newest tokens is free, once
            assert sorted(decode._free_slots) == list(range(bench.config.decode.max_running))
            self.network.send(self.gateway, ref, LedgerQuery(1))
        self.settle()
        assert all(ledger.idle for ledger in self.ledgers.values())


@pytest.fixture(params=[False, True], ids=["in-step", "overlapped"])
def house(request: pytest.FixtureRequest) -> Callable[..., House]:
    """House, with workers that compute while they are called, and with workers whose device works on its own."""
    return partial(House, overlaps=request.param)


@pytest.fixture
def model_oracle():
    return hand_made.oracle


@pytest.fixture
def sampled_oracle():
    return hand_made.sampled_oracle
