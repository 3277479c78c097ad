"""A process that `baton bench gateway` measures: `python -P -m baton.launch.bench_gateway_server FD`.

FD is a pipe as that of `baton.launch.child`. The port goes to stdout once requests are answered.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from ..bench.bare_server import bare_server, prebuilt_chunks
from ..core.config import GatewayConfig
from ..core.messages import NodeRef
from ..gateway.app import serving
from ..gateway.gateway import Gateway
from ..vocab.detokenizer import Detokenizer
from ..vocab.tokenizer import Tokenizer
from .child import watch_launcher
from .fake_workers import FakeWorkers

_READY_TIMEOUT_S = 30.0


class ServerConfig(msgspec.Struct, frozen=True):
    """`kind`: "gateway", or "bare". `num_ahead`: as in FakeWorkers; of a bare server: 1 lets the others have their turn
    after each chunk.
    """

    kind: str
    model_folder: str
    served_model: str
    answer: list[int]
    num_streams: int
    num_ahead: int


async def serve(config: ServerConfig) -> None:
    """Until this process is ended."""
    async with AsyncExitStack() as stack:
        if config.kind == "bare":
            detokenizer = Detokenizer(Tokenizer.from_folder(Path(config.model_folder)))
            texts = [detokenizer.push([token_id]) for token_id in config.answer]
            texts[-1] += detokenizer.finish()
            chunks = prebuilt_chunks(texts, config.served_model)
            port = await stack.enter_async_context(bare_server(chunks, yields=config.num_ahead == 1))
        else:
            port = await stack.enter_async_context(_gateway(config))
        print(port, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def _gateway(config: ServerConfig) -> AsyncIterator[int]:
    ref = NodeRef("gateway-0", 1)
    settings = GatewayConfig(
        gateway_id=ref.node_id,
        served_model=config.served_model,
        model_folder=config.model_folder,
        model_digest="fake",
        host="127.0.0.1",
        port=0,
        bind=(),
        key_file="",
        expected_prefill=0,
        expected_decode=1,
        worker_timeout_s=1e6,
    )
    gateway = Gateway(settings, ref, FakeWorkers(ref, config.answer, config.num_streams + 1, config.num_ahead))
    async with serving(gateway) as server:
        async with asyncio.timeout(_READY_TIMEOUT_S), aiohttp.ClientSession() as http:
            while (await http.get(f"http://127.0.0.1:{server.port}/ready")).status != 200:
                await asyncio.sleep(0.01)
        yield server.port


def main(descriptor: int) -> None:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(descriptor, 65536)
    watch_launcher(descriptor)
    uvloop.run(serve(msgspec.json.decode(line, type=ServerConfig)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
