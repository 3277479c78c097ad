"""What is hardly HTTP, or hardly JSON, byte by byte over a socket: a 4xx with an error object for each, never a 5xx."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

POSTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/batches",
    "/v1/files",
    "/tokenize",
    "/detokenize",
    "/roles",
)
PATHS = (
    *(
        "/nope",
        "/v1/nope",
        "//",
        "/v1//models",
        "/v1/models/",
        "*",
        "/%",
        "/%zz",
        "",
        "/a b",
        "/\xe9",
        "/" + "x" * 9000,
    ),
    *(f"/v1/{kind}/{odd}" for kind in ("models", "files", "batches", "responses") for odd in ("%00", "%ff", "..%2f..")),
    *("/v1/files/%ed%a0%80/content", "/v1/files?after=%ed%a0%80", "/v1/files?limit=\xd9\xa1", "/v1/batches?after=%00"),
)
BODIES = {
    "cut": b"{",
    "control character": b'{"a":"\x00"}',
    "not UTF-8": b'{"model":"\xff\xfe","worker":"\xff"}',
    "key not UTF-8": b'{"\xff":1}',
    "UTF-16": '{"prompt":"x"}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep field": b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "lone surrogate": b'{"worker":"\\ud800","model":"\\ud800","input_file_id":"\\ud800"}',
    "beyond a double": b'{"max_tokens":1e400,"tokens":[1e400]}',
    "2 ** 70": b'{"max_tokens":%d,"max_output_tokens":%d,"tokens":[%d]}' % ((2**70,) * 3),
    "5000 digits": b'{"max_tokens":' + b"9" * 5000 + b"}",
    "NaN": b'{"temperature":NaN}',
    "twice, the second wrong": b'{"prompt":"a","prompt":5,"messages":[],"messages":5,"input":"a","input":5}',
    "more behind it": b'{"prompt":"x"} x',
    "no object": b"null",
    "nothing": b"",
}
# Headers, body; the length is told unless the headers tell how long it is.
ENCODED: dict[str, tuple[list[bytes], bytes]] = {
    "no gzip": ([b"Content-Encoding: gzip"], b"no gzip"),
    "cut gzip": ([b"Content-Encoding: gzip"], gzip.compress(bytes(range(256)) * 9)[:-20]),
    "no deflate": ([b"Content-Encoding: deflate"], b"xxxx"),
    "brotli": ([b"Content-Encoding: br"], b"xx"),
    "gzip bomb": ([b"Content-Encoding: gzip"], gzip.compress(b" " * 20_000_000)),
    "unknown charset": ([b"Content-Type: application/json; charset=nope"], b"{"),
    "odd type": ([b"Content-Type: ;;;///"], b"{"),
    "a form": ([b"Content-Type: multipart/form-data; boundary=x"], b"--x\r\n\r\n--x--"),
    "a form without boundary": ([b"Content-Type: multipart/form-data"], b"a=b"),
    "unknown expectation": ([b"Expect: wonders"], b"{}"),
    "odd chunks": ([b"Transfer-Encoding: chunked"], b"zz\r\n{}\r\n"),
    "huge chunk": ([b"Transfer-Encoding: chunked"], b"ffffffffffffffffffff\r\n{}\r\n"),
    "chunks that break off": ([b"Transfer-Encoding: chunked"], b"1\r\n{\r\n0\r\n\r\n"),
    "two lengths": ([b"Transfer-Encoding: chunked", b"Content-Length: 5"], b"0\r\n\r\n"),
    "negative length": ([b"Content-Length: -5"], b""),
    "no number": ([b"Content-Length: abc"], b""),
}
NO_REQUESTS = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: a\x00b\r\n\r\n",
    "split header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rb\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: a\r\n" * 40_000 + b"\r\n",
}


def spelled(method: str, path: str, body: bytes = b"", headers: list[bytes] | None = None) -> bytes:
    headers = headers or []
    if not any(header.startswith((b"Content-Length", b"Transfer-Encoding")) for header in headers):
        headers = [*headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode("latin1"), b"Host: x", *headers, b"", body])


async def answer_to(world: Any, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.rstrip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            length = 0 if request.startswith(b"HEAD") else int(headers["content-length"])
            return int(status.split()[1]), headers, await reader.readexactly(length)
    finally:
        writer.close()


async def check_refused(world: Any, name: str, request: bytes) -> int:
    """The status, which is a 4xx; the answer is an error object, and says who it is."""
    status, headers, body = await answer_to(world, request)
    assert 400 <= status < 500, (name, status, body[:300])
    assert "x-request-id" in headers, name
    if not request.startswith(b"HEAD"):
        assert headers["content-type"] == "application/json", name
        assert len(body) < 1000, name
        answer = json.loads(body)
        assert {"message", "type"} <= answer["error"].keys(), (name, answer)
        assert "error" in answer
        assert "aiohttp" not in answer["error"]["message"]
    return status


@pytest.mark.parametrize("path", POSTED)
def test_bodies(in_world: Any, path: str) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for name, body in BODIES.items():
            await check_refused(world, f"{path} {name}", spelled("POST", path, body))
        for name, (headers, body) in ENCODED.items():
            await check_refused(world, f"{path} {name}", spelled("POST", path, body, headers))
        assert (await world.answer_to("/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200

    in_world(scenario)


@pytest.mark.parametrize("path", POSTED)
def test_a_body_that_does_not_come(in_world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str) -> None:
    """Whether it stops at once or in the middle; of a form, within its headers, a field or its file."""
    monkeypatch.setattr("baton.gateway.bodies.BODY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("baton.gateway.batches.upload.STALL_S", 0.05)
    headers, bodies = [b"Content-Length: 5000"], [b"", b'{"model":']
    if path == "/v1/files":
        headers.append(b"Content-Type: multipart/form-data; boundary=x")
        part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\nba'
        bodies = [b"", b"--x\r\nContent-Dis", part % b"purpose", part % b"file"]

    async def scenario(world: Any) -> None:
        await world.pair()
        for body in bodies:
            assert await check_refused(world, f"{path} {body!r}", spelled("POST", path, body, headers)) == 408

    in_world(scenario, batch_dir=str(tmp_path))


def test_methods_and_paths(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for path in POSTED:
            for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "FOO", "post"):
                status = await check_refused(world, f"{method} {path}", spelled(method, path))
                assert status == (400 if method in ("FOO", "post") else 405), (method, path)
        for path in PATHS:
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                if (method, path) != ("OPTIONS", "*"):
                    await check_refused(world, f"{method} {path}", spelled(method, path))
        for path in ("/health", "/v1/models", "/metrics"):
            status, headers, _ = await answer_to(world, spelled("HEAD", path))
            assert (status, "content-length" in headers) == (200, True)

    in_world(scenario)


def test_what_is_no_request(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for name, request in NO_REQUESTS.items():
            assert await check_refused(world, name, request) == 400
        async with world.http.get(world.url + "/metrics") as response:
            text = await response.text()
        assert f'baton_http_responses_total{{status_class="4xx"}} {len(NO_REQUESTS)}.0' in text

    in_world(scenario)


def test_good_requests_in_odd_clothes(in_world: Any) -> None:
    body = b'{"prompt":"x","max_tokens":1,"max_tokens":2}'
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"

    async def scenario(world: Any) -> None:
        await world.pair()
        for headers, sent in (
            ([b"Content-Encoding: gzip"], gzip.compress(body)),
            ([b"Transfer-Encoding: chunked"], chunked),
            ([b"Content-Type: text/plain"], body),
            ([b"Cookie: \xff=;;", b"X-Request-Id: \xff"], body),
            ([b"Authorization: Bearer \xff\xfe"], body),
        ):
            status, _, answer = await answer_to(world, spelled("POST", "/v1/completions", sent, headers))
            assert status == 200, (headers, answer)
            assert json.loads(answer)["usage"]["completion_tokens"] == 2

    in_world(scenario)
