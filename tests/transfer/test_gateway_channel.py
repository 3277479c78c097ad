"""Gateway and workers over real sockets: Hello, Welcome, beats, restarts of either side."""

import asyncio
import select
import socket as plain_socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
import zmq

from baton.core.config import NetworkConfig
from baton.core.errors import ConfigurationError
from baton.core.messages import Beat, Goodbye, Hello, NodeRef, Role, Welcome, WhoAreYou, WorkerInfo
from baton.transfer.channels import BeatThread, Incoming, PeerUnreachable, WorkerChannels
from baton.transfer.gateway_channel import GatewayChannel
from baton.transfer.keys import ClusterKeys
from baton.transfer.sockets import main_routing_id
from baton.transfer.wire import encode

GATEWAY, GATEWAY_AGAIN, WORKER, WORKER_AGAIN = (
    NodeRef("gateway-0", 1),
    NodeRef("gateway-0", 2),
    NodeRef("decode-0", 22),
    NodeRef("decode-0", 33),
)


def hello(channels: WorkerChannels, ref: NodeRef) -> Hello:
    info = WorkerInfo(
        ref=ref,
        roles=(Role.DECODE,),
        pid=1,
        device="cpu",
        model="m",
        model_digest="d",
        wire_digest="w",
        host_digest=channels.host_digest,
        endpoints=channels.endpoints,
        block_size=16,
        num_blocks=8,
        context_length=64,
        max_running=4,
        threads=1,
    )
    return Hello(info)


@pytest.fixture
def keys(tmp_path: Path) -> ClusterKeys:
    return ClusterKeys.create(tmp_path / "keys")


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "ipc":
        yield f"ipc://{tmp_path}/gateway.sock"
    else:
        with plain_socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield f"tcp://127.0.0.1:{port}"


def worker(tmp_path: Path, keys: ClusterKeys, ref: NodeRef, address: str) -> WorkerChannels:
    return WorkerChannels(NetworkConfig(str(tmp_path), "127.0.0.1", (address,), ""), ref, keys)


async def next_of(channel: GatewayChannel, kind: type) -> object:
    async with asyncio.timeout(10):
        while True:
            incoming = await channel.receive()
            if isinstance(incoming.body, kind):
                return incoming


def poll_one(channels: WorkerChannels) -> object:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for incoming in channels.poll(0.05):
            return incoming
    raise AssertionError("nothing came")


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_hello_welcome_and_back(tmp_path: Path, keys: ClusterKeys, address: str, runner: object) -> None:
    async def scenario() -> None:
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))  # before the gateway is there
        with pytest.raises(PeerUnreachable):
            channels.send(GATEWAY, Goodbye())
        channel = GatewayChannel((address,), GATEWAY, keys)
        assert channel.addresses == (address,)
        incoming = await next_of(channel, Hello)
        assert (incoming.sender, incoming.body) == (WORKER, hello(channels, WORKER))
        channel.send(WORKER, Welcome(GATEWAY, []))
        assert poll_one(channels).body == Welcome(GATEWAY, [])
        channels.send(GATEWAY, Goodbye())
        channels.broadcast_gateways(Goodbye())
        assert (await next_of(channel, Goodbye)).sender == WORKER
        assert (await next_of(channel, Goodbye)).sender == WORKER
        channel.forget(WORKER)
        with pytest.raises(PeerUnreachable):
            channel.send(WORKER, Welcome(GATEWAY, []))
        channels.close()
        channel.close()

    runner(scenario())


async def send_for_ever(channel: GatewayChannel) -> None:
    while True:
        channel.send(WORKER, Beat(2, 0))
        await asyncio.sleep(0.001)


def test_a_connection_that_ends_is_noticed(tmp_path: Path, keys: ClusterKeys, address: str) -> None:
    async def scenario() -> None:
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))
        channel = GatewayChannel((address,), GATEWAY, keys)
        await next_of(channel, Hello)
        channel.send(WORKER, Beat(1, 0))
        assert not channel.disconnected.is_set()
        channels.close()
        async with asyncio.timeout(5):
            await channel.disconnected.wait()
            with pytest.raises(PeerUnreachable):
                await send_for_ever(channel)  # the socket hears of it a little after its monitor
        channel.close()

    asyncio.run(scenario())


def test_a_gateway_that_comes_back_learns_of_the_worker_by_its_beat(
    tmp_path: Path, keys: ClusterKeys, address: str
) -> None:
    async def scenario() -> None:
        channels = worker(tmp_path, keys, WORKER, address)
        beat = BeatThread(NetworkConfig("", "127.0.0.1", (address,), ""), WORKER, keys, lambda: 7)
        beat.start()
        first = GatewayChannel((address,), GATEWAY, keys)
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(first, Hello)
        first.send(WORKER, Welcome(GATEWAY, []))
        assert poll_one(channels).sender == GATEWAY
        assert (await next_of(first, Beat)).body == Beat(1, 7)
        first.close()
        second = GatewayChannel((address,), GATEWAY_AGAIN, keys)
        channels.send(GATEWAY, Goodbye())  # meant for the first life: must not reach the second
        answered = False
        deadline = time.monotonic() + 10
        while not answered and time.monotonic() < deadline:
            assert (await next_of(second, Beat)).sender == WORKER
            try:
                second.send(WORKER, WhoAreYou())
                answered = True
            except PeerUnreachable:  # its main connection is not back yet; the next beat comes in a second
                continue
        assert poll_one(channels).body == WhoAreYou()
        channels.broadcast_gateways(hello(channels, WORKER))
        assert (await next_of(second, Hello)).sender == WORKER
        second.send(WORKER, Welcome(GATEWAY_AGAIN, []))
        assert poll_one(channels).sender == GATEWAY_AGAIN
        with pytest.raises(PeerUnreachable):
            channels.send(GATEWAY, Goodbye())
        beat.stop()
        channels.close()
        second.close()

    asyncio.run(scenario())


def test_a_restarted_worker_is_reached_at_once(tmp_path: Path, keys: ClusterKeys, address: str) -> None:
    """ZQ05: the same worker id comes back while the gateway goes on sending to its first life."""

    async def scenario() -> None:
        channel = GatewayChannel((address,), GATEWAY, keys)
        first = worker(tmp_path, keys, WORKER, address)
        first.broadcast_gateways(hello(first, WORKER))
        await next_of(channel, Hello)
        for _ in range(100):
            channel.send(WORKER, Beat(1, 1))
        first.close()
        second = worker(tmp_path, keys, WORKER_AGAIN, address)
        second.broadcast_gateways(hello(second, WORKER_AGAIN))
        started = time.monotonic()
        await next_of(channel, Hello)
        channel.send(WORKER_AGAIN, Welcome(GATEWAY, []))
        assert poll_one(second).body == Welcome(GATEWAY, [])
        assert time.monotonic() - started < 1.0
        with pytest.raises(PeerUnreachable):  # noqa: PT012
            for _ in range(100_000):
                channel.send(WORKER, Beat(1, 1))
        second.close()
        channel.close()

    asyncio.run(scenario())


def test_a_reader_that_sleeps_makes_send_fail_and_loses_nothing(
    tmp_path: Path, keys: ClusterKeys, address: str
) -> None:
    """ZQ01 from the gateway's side."""

    async def scenario() -> None:
        channel = GatewayChannel((address,), GATEWAY, keys)
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(channel, Hello)
        sent = 0
        with pytest.raises(PeerUnreachable, match="does not read"):  # noqa: PT012
            while sent < 500_000:
                channel.send(WORKER, Beat(sent, 0))
                sent += 1
        received: list[int] = []
        deadline = time.monotonic() + 30
        while len(received) < sent and time.monotonic() < deadline:
            received += [i.body.sequence for i in channels.poll(0.05)]
        assert received == list(range(sent))
        channels.close()
        channel.close()

    asyncio.run(scenario())


def test_many_messages_into_a_gateway_that_sends_meanwhile(tmp_path: Path, keys: ClusterKeys, address: str) -> None:
    """Every send may swallow the sign that something came in: none of 5,000 echoes may get stuck."""

    async def scenario() -> None:
        channel = GatewayChannel((address,), GATEWAY, keys)
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(channel, Hello)
        channel.send(WORKER, Welcome(GATEWAY, []))
        poll_one(channels)
        for n in range(5_000):
            channels.send(GATEWAY, Beat(n, 0))
        for n in range(5_000):
            incoming = await next_of(channel, Beat)
            assert incoming.body == Beat(n, 0)
            channel.send(WORKER, Beat(n, 1))
        received = 0
        deadline = time.monotonic() + 10
        while received < 5_000 and time.monotonic() < deadline:
            received += len(channels.poll(0.05))
        assert received == 5_000
        channels.close()
        channel.close()

    uvloop.run(scenario())


def test_a_send_that_swallows_the_sign_of_an_arrival_passes_it_on(
    tmp_path: Path, keys: ClusterKeys, address: str
) -> None:
    async def scenario() -> None:
        channel = GatewayChannel((address,), GATEWAY, keys)
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(channel, Hello)
        channel.send(WORKER, Welcome(GATEWAY, []))
        poll_one(channels)
        for n in range(20):
            reader = asyncio.create_task(next_of(channel, Beat))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # it waits now
            channels.send(GATEWAY, Beat(n, 0))
            assert select.select([channel._routers[0].fileno()], [], [], 5)[0]  # there, and the loop has not seen it
            channel.send(WORKER, Beat(n, 0))
            assert (await reader).body == Beat(n, 0)
        channels.close()
        channel.close()

    asyncio.run(scenario())


def test_a_reader_that_always_finds_a_message_lets_others_run(
    tmp_path: Path, keys: ClusterKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        channel = GatewayChannel((f"ipc://{tmp_path}/gateway.sock",), GATEWAY, keys)
        monkeypatch.setattr(channel, "_take", lambda: channel._received.append(Incoming(WORKER, Beat(0, 0))))
        others = asyncio.Event()
        asyncio.get_running_loop().call_soon(others.set)
        for _ in range(10):
            await channel.receive()
        assert others.is_set()
        channel.close()

    asyncio.run(scenario())


def test_an_idle_reader_costs_no_time(tmp_path: Path, keys: ClusterKeys, address: str) -> None:
    """Nobody awaits receive() while messages are there: the loop must sleep, not spin."""

    async def scenario() -> None:
        channel = GatewayChannel((address,), GATEWAY, keys)
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(channel, Hello)
        for _ in range(10):
            channels.broadcast_gateways(hello(channels, WORKER))
        assert select.select([channel._routers[0].fileno()], [], [], 5)[0]
        before = time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before < 0.2
        channels.close()
        channel.close()

    asyncio.run(scenario())


def test_garbage_is_counted_and_dropped(tmp_path: Path, keys: ClusterKeys) -> None:
    address = f"ipc://{tmp_path}/gateway.sock"

    async def scenario() -> None:
        channel = GatewayChannel((address,), GATEWAY, keys)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(address)
        for frames in ([b"garbage"], [b""], [b"a", b"b"], [msgspec.msgpack.encode(["Hello"])]):
            dealer.send_multipart(frames)
        channels = worker(tmp_path, keys, WORKER, address)
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(channel, Hello)
        while channel.num_dropped < 4:  # bounded by the test's own timeout
            channels.broadcast_gateways(hello(channels, WORKER))
            await next_of(channel, Hello)
        assert channel.num_dropped == 4
        dealer.close()
        context.term()
        channels.close()
        channel.close()

    asyncio.run(scenario())


def test_without_the_key_nothing_goes_in_or_out(tmp_path: Path, keys: ClusterKeys) -> None:
    """A client that takes a worker's name and routing id, but has no key, is not heard and is sent nothing."""

    async def scenario() -> None:
        channel = GatewayChannel(("tcp://127.0.0.1:0",), GATEWAY, keys)
        (address,) = channel.addresses
        channels = worker(tmp_path, keys, WORKER, address)
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.routing_id = main_routing_id(WORKER)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(address)
        stranger.send(encode(WORKER, 0, hello(channels, WORKER)))
        assert monitor.poll(5000), "the connection was not refused"
        channels.broadcast_gateways(Goodbye())  # to nobody: no gateway has answered
        channels.broadcast_gateways(hello(channels, WORKER))
        await next_of(channel, Hello)
        channel.send(WORKER, Welcome(GATEWAY, []))
        assert poll_one(channels).body == Welcome(GATEWAY, [])
        assert not stranger.poll(100)
        assert not channel._received
        stranger.disable_monitor()
        monitor.close()
        stranger.close()
        context.term()
        channels.close()
        channel.close()

    asyncio.run(scenario())


def test_a_port_in_use_and_port_zero(keys: ClusterKeys) -> None:
    async def scenario() -> None:
        channel = GatewayChannel(("tcp://127.0.0.1:0",), GATEWAY, keys)
        (address,) = channel.addresses
        assert int(address.rsplit(":", 1)[1]) > 0
        with pytest.raises(ConfigurationError, match="another address or port"):
            GatewayChannel((address,), GATEWAY, keys)
        channel.close()

    asyncio.run(scenario())


def test_a_beat_thread_stops_promptly_and_may_never_have_started(keys: ClusterKeys, address: str) -> None:
    network = NetworkConfig("", "127.0.0.1", (address,), "")
    BeatThread(network, WORKER, keys, lambda: 0).stop()
    beat = BeatThread(network, WORKER, keys, lambda: 0)
    beat.start()
    started = time.monotonic()
    beat.stop()
    beat.stop()
    assert time.monotonic() - started < 0.5
