"""The gateway over its real sockets: uvloop, ZeroMQ, HTTP, signals, and the real OpenAI client."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import uvloop

from baton.core.config import GatewayConfig, NetworkConfig
from baton.core.messages import CacheSnapshot, GenerateRequest, Hello, NodeRef, Role, TokenChunk, Welcome
from baton.core.request import FinishReason
from baton.gateway.app import serving
from baton.gateway.gateway import open_gateway
from baton.transfer.channels import WorkerChannels
from baton.transfer.keys import ClusterKeys

ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> GatewayConfig:
    ClusterKeys.create(tmp_path / "keys")
    return GatewayConfig(
        gateway_id="gateway-0",
        served_model="tiny-llama",
        model_folder=str(tiny_model),
        model_digest="digest",
        host="127.0.0.1",
        port=0,
        bind=(f"ipc://{tmp_path}/g.sock", "tcp://127.0.0.1:*"),
        key_file=str(tmp_path / "keys"),
        expected_prefill=0,
        expected_decode=1,
    )


@pytest.fixture
def decode_worker(config: GatewayConfig, tmp_path: Path, answer: list[int], world_module: Any) -> Iterator[None]:
    """A decode worker's channels in a thread; answers everything at once."""
    stopping = threading.Event()

    def run() -> None:
        network = NetworkConfig(str(tmp_path), "127.0.0.1", config.bind[:1], config.key_file)
        ref = NodeRef("decode-0", 1)
        channels = WorkerChannels(network, ref, ClusterKeys.load(config.key_file))
        channels.broadcast_gateways(Hello(world_module.worker_info("decode-0", Role.DECODE)))
        while not stopping.is_set():
            for incoming in channels.poll(0.01):
                match incoming.body:
                    case Welcome():
                        channels.send(incoming.sender, CacheSnapshot(0, []))
                    case GenerateRequest(request=request):
                        sampling = request.sampling
                        tokens = answer[: sampling.max_tokens]
                        reason = FinishReason.STOP if tokens == answer else FinishReason.LENGTH
                        channels.send(
                            incoming.sender, TokenChunk(request.request_id, 0, 0, tokens, reason, num_cached_tokens=0)
                        )
        channels.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    stopping.set()
    thread.join(10)


def with_gateway(config: GatewayConfig, work: Callable[[str], None]) -> None:
    """Runs `work(url)` in a thread beside a gateway in uvloop, once it is ready."""

    async def main() -> None:
        gateway, channel = open_gateway(config)
        try:
            async with asyncio.timeout(30), serving(gateway) as server, aiohttp.ClientSession() as http:
                url = f"http://127.0.0.1:{server.port}"
                while (await http.get(f"{url}/ready")).status != 200:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(work, url)
        finally:
            channel.close()

    uvloop.run(main())


def test_the_real_client(config: GatewayConfig, decode_worker: None) -> None:
    def work(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            (model,) = client.models.list().data
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = client.chat.completions.create(model=model.id, messages=messages, temperature=0)
            assert whole.choices[0].message.content == ANSWER
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage is not None
            options: Any = {"include_usage": True}
            chunks = list(
                client.chat.completions.create(model=model.id, messages=messages, stream=True, stream_options=options)
            )
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
            assert chunks[-1].usage == whole.usage
            parts = list(client.completions.create(model=model.id, prompt=["a", "b"], stream=True, max_tokens=500))
            for index in (0, 1):
                assert "".join(p.choices[0].text for p in parts if p.choices[0].index == index) == ANSWER
            short = client.completions.create(model=model.id, prompt="a", max_tokens=3)
            assert short.choices[0].finish_reason == "length"
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=model.id, prompt="a", max_tokens=-1)
            assert refused.value.param == "max_tokens"
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="other", prompt="a")

    with_gateway(config, work)


def start(config: GatewayConfig) -> "subprocess.Popen[str]":
    script = (
        "import logging, sys, msgspec\n"
        "from baton.core.config import GatewayConfig\n"
        "from baton.gateway.app import run_gateway\n"
        "assert 'torch' not in sys.modules\n"
        "logging.basicConfig(level='INFO')\n"
        "run_gateway(msgspec.json.decode(sys.argv[1], type=GatewayConfig))\n"
    )
    command = [sys.executable, "-P", "-c", script, msgspec.json.encode(config).decode()]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "listening on" in line:
            return line.split()[-1]
    raise AssertionError("it ended before it listened")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(config: GatewayConfig, number: signal.Signals) -> None:
    process = start(config)
    url_of(process)
    process.send_signal(number)
    assert process.wait(10) == 0
    assert process.stderr is not None
    rest = process.stderr.read()
    process.stderr.close()
    assert "Traceback" not in rest


@pytest.mark.slow
def test_the_second_signal_does_not_wait(config: GatewayConfig) -> None:
    """A request that no worker will answer holds the drain up."""

    async def main(process: "subprocess.Popen[str]") -> None:
        url = await asyncio.to_thread(url_of, process)
        async with aiohttp.ClientSession() as http:
            request = asyncio.create_task(post(http, url))
            while json.loads(await (await http.get(f"{url}/ledger")).text())["gateway"]["queued"] == 0:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert "draining" in await asyncio.to_thread(process.stderr.readline)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 5) == 0
            assert await request in (503, None)

    async def post(http: aiohttp.ClientSession, url: str) -> int | None:
        try:
            async with http.post(f"{url}/v1/completions", json={"prompt": "x"}) as response:
                return response.status
        except aiohttp.ClientError:
            return None

    process = start(config)
    asyncio.run(main(process))
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.slow
def test_a_port_in_use(config: GatewayConfig) -> None:
    first = start(config)
    port = int(url_of(first).rsplit(":", 1)[1])
    second = start(msgspec.structs.replace(config, port=port, bind=()))
    assert second.stderr is not None
    assert "Choose another port" in second.stderr.read()
    assert second.wait(10) == 1
    first.terminate()
    assert first.wait(10) == 0
    for process in (first, second):
        assert process.stderr is not None
        process.stderr.close()
