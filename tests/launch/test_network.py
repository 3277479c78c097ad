"""Ports, addresses and one HTTP GET, on the loopback interface."""

import asyncio
import socket

import pytest

from baton.core.errors import ConfigurationError
from baton.launch.network import address_towards, claim_port, http_get
from baton.launch.options import HostPort


def test_port_0_becomes_a_real_one_that_is_free():
    claimed = claim_port("--port", HostPort("127.0.0.1", 0))
    assert claimed.port > 0
    with socket.create_server(("127.0.0.1", claimed.port)):
        pass


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--port: port {port} on 127\.0\.0\.1 is in use.*port 0"):
            claim_port("--port", HostPort("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigurationError, match=r"--port: cannot listen on 192\.0\.2\.1:0"):
        claim_port("--port", HostPort("192.0.2.1", 0))  # TEST-NET-1: nobody has it


def test_the_address_towards_loopback_is_loopback():
    assert address_towards(HostPort("localhost", 1)) == "127.0.0.1"


def _get(answer: bytes, timeout_s: float = 10.0):
    async def main():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await http_get(HostPort("127.0.0.1", port), "/ready", timeout_s)

    return asyncio.run(main())


def test_http_get_returns_status_and_body():
    assert _get(b"HTTP/1.1 503 Service Unavailable\r\nX: y\r\n\r\n" + b"x" * 200_000) == (503, "x" * 200_000)
    assert _get(b"HTTP/1.0 200 OK\r\n\r\n") == (200, "")


@pytest.mark.parametrize("answer", [b"", b"garbage", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_no_http_is_an_os_error(answer):
    with pytest.raises(OSError, match="no HTTP answer"):
        _get(answer)


def test_nobody_there_is_an_os_error():
    free = claim_port("--port", HostPort("127.0.0.1", 0))
    with pytest.raises(OSError, match=str(free.port)):
        asyncio.run(http_get(free, "/ready", 5.0))
