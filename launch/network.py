"""Small network questions of the launcher: a free port, the address others see, an HTTP status."""

import asyncio
import errno
import socket

from ..core.errors import ConfigurationError
from .options import HostPort

_MAX_RESPONSE = 64 * 1024


def claim_port(option: str, address: HostPort) -> HostPort:
    """Check that `address` can be bound, choosing a port when it is 0. Raises ConfigurationError saying why not.

    The port is free at this moment; nobody holds it until the gateway binds it.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigurationError(
            f"{option}: {address.host!r} is not an address of this machine ({error.strerror}). "
            "Use 127.0.0.1, or the machine's own address."
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            raise ConfigurationError(_why_not(option, address, error)) from error
        return HostPort(address.host, int(probe.getsockname()[1]))


def _why_not(option: str, address: HostPort, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{option}: port {address.port} on {address.host} is in use by another process. "
            "Stop that one, choose another port, or let Baton find a free one with port 0."
        )
    if error.errno == errno.EACCES:
        return f"{option}: port {address.port} needs the rights of root. Choose one from 1024 on."
    return (
        f"{option}: cannot listen on {address.text} ({error.strerror}). Use 127.0.0.1, or an address of this machine."
    )


def address_towards(gateway: HostPort) -> str:
    """The address of this machine on the way to `gateway`: where its other workers can reach this one."""
    if gateway.is_loopback:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((gateway.host, gateway.port))  # UDP: nothing is sent
        except OSError as error:
            raise ConfigurationError(
                f"--join {gateway.text}: no way there ({error.strerror}). Check the address and the network."
            ) from error
        return str(probe.getsockname()[0])


async def http_get(address: HostPort, path: str, timeout_s: float, api_key: str = "") -> tuple[int, str]:
    """Status and body of one GET. Raises OSError or TimeoutError when there is no answer."""
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(_reachable(address.host), address.port)
        try:
            # 1.0: the server closes after the answer, whose end is then known without parsing.
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {address.text}\r\n{key}\r\n".encode())
            response = await reader.read(_MAX_RESPONSE)
            while part := await reader.read(_MAX_RESPONSE):
                response += part
        finally:
            writer.close()
    head, _, body = response.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionError("no HTTP answer")
    return int(words[1]), body.decode(errors="replace")


def _reachable(host: str) -> str:
    """Where this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
