"""Files and batches as the official client uses them, against a live gateway with fake workers."""

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from baton.core.messages import GenerateRequest
from baton.gateway.batches import upload as upload_module
from baton.gateway.batches import validation
from baton.gateway.keys import digest_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = ("completed", "failed", "expired", "cancelled")
ANSWER = "Grüße, 世界! Baton runs 🏃 and stops."
KEYS = ("key-one", "key-two")
Scenario = Callable[[Any, openai.AsyncOpenAI], Awaitable[None]]


def chat_line(custom_id: str, text: str = "hi", **body: Any) -> dict[str, Any]:
    fields = {"model": "tiny-llama", "messages": [{"role": "user", "content": text}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": fields}


def jsonl(*lines: Any) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


def client_of(world: Any, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=key, max_retries=0)


async def upload(client: openai.AsyncOpenAI, content: bytes, name: str = "input.jsonl") -> Any:
    return await client.files.create(file=(name, content), purpose="batch")


async def create(client: openai.AsyncOpenAI, *lines: Any, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = await upload(client, jsonl(*lines))
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(batch_id)).status not in DONE:
            await asyncio.sleep(0.01)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


@pytest.fixture
def with_client(in_world: Any, tmp_path: Path) -> Callable[..., None]:
    """Runs `scenario(world, client)` in a world that keeps batches; its workers have joined."""

    def run(scenario: Scenario, **changes: Any) -> None:
        async def whole(world: Any) -> None:
            await world.pair()
            async with client_of(world, KEYS[0]) as client:
                await scenario(world, client)

        in_world(whole, batch_dir=str(tmp_path / "kept" / "batches"), **changes)

    return run


def test_a_batch_from_file_to_file(with_client: Any) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        lines = [chat_line(f"id-{i}", f"question {i}") for i in range(100)]
        lines[7]["body"]["top_p"] = 5
        lines[9]["body"]["model"] = 3
        batch = await create(client, *lines, metadata={"for": "me"})
        assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", CHAT)
        assert batch.expires_at == batch.created_at + 24 * 3600
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.metadata == {"for": "me"}
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 98, 2)

        outputs = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in outputs] == [f"id-{i}" for i in range(100) if i not in (7, 9)]
        assert len({line["id"] for line in outputs}) == 98
        for line in outputs:
            assert line["error"] is None
            assert line["response"]["status_code"] == 200
            answer = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"])
            assert answer.choices[0].message.content == ANSWER
            assert answer.id == f"chatcmpl-{line['response']['request_id']}"
        errors = await lines_of(client, batch.error_file_id)
        assert [line["custom_id"] for line in errors] == ["id-7", "id-9"]
        assert [line["response"]["status_code"] for line in errors] == [400, 400]
        assert errors[0]["response"]["body"]["error"]["param"] == "top_p"
        assert errors[0]["error"] is None

        used = [line["response"]["body"]["usage"] for line in outputs]
        assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used) > 0
        assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in used) > 0
        assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in used)
        assert batch.usage.input_tokens_details.cached_tokens == cached
        async with world.http.get(f"{world.url}/metrics") as response:
            metrics = await response.text()
        assert 'baton_batch_lines_total{outcome="completed"} 98.0' in metrics
        assert 'baton_batch_lines_total{outcome="failed"} 2.0' in metrics

        output = await client.files.retrieve(batch.output_file_id)
        assert output.purpose == "batch_output"
        assert output.bytes == len((await client.files.content(output.id)).content)

    with_client(scenario)


def test_completions_too_and_at_batch_priority(with_client: Any) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        decode = next(w for w in world.channel.workers.values() if w.ref.node_id == "decode-0")
        bodies: list[dict[str, Any]] = [
            {"prompt": "one", "max_tokens": 4, "stream": False},
            {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "service_tier": "priority", "cache_salt": "s"},
        ]
        lines = [{"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": b} for i, b in enumerate(bodies)]
        batch = await ended(client, (await create(client, *lines, endpoint=COMPLETIONS)).id)
        outputs = await lines_of(client, batch.output_file_id)
        assert [len(line["response"]["body"]["choices"]) for line in outputs] == [1, 4]
        requests = [message.request for message in decode.of(GenerateRequest)]
        assert all(request.urgency.is_batch for request in requests)
        assert {request.urgency.key for request in requests} == {digest_of(KEYS[0])[:16]}
        # A line shares cached prefixes with what its key asks live.
        await client.completions.create(model="tiny-llama", prompt="one", max_tokens=4)
        live = decode.of(GenerateRequest)[-1].request
        assert not live.urgency.is_batch
        assert live.urgency.key == requests[0].urgency.key
        assert live.namespace == next(r.namespace for r in requests if r.prompt_token_ids == live.prompt_token_ids)

    with_client(scenario, api_key_digests=tuple(map(digest_of, KEYS)))


def test_responses_too(with_client: Any) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        bodies: list[dict[str, Any]] = [
            {"input": "hi", "instructions": "be kind", "store": True},
            {"input": "hi", "previous_response_id": "resp_1"},
            {"input": "hi", "max_output_tokens": 10**9},
        ]
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/responses", "body": {"model": "tiny-llama"} | body}
            for i, body in enumerate(bodies)
        ]
        batch = await ended(client, (await create(client, *lines, endpoint="/v1/responses")).id)
        (line,) = await lines_of(client, batch.output_file_id)
        response = openai.types.responses.Response.model_validate(line["response"]["body"])
        assert response.output_text == ANSWER
        assert (response.status, line["response"]["body"]["store"]) == ("completed", False)
        counts = ("input_tokens", "output_tokens", "total_tokens")
        assert all(getattr(batch.usage, name) == getattr(response.usage, name) > 0 for name in counts)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        errors = [line["response"]["body"]["error"] for line in await lines_of(client, batch.error_file_id)]
        assert [error["param"] for error in errors] == ["previous_response_id", "max_output_tokens"]

    with_client(scenario)


GOOD = chat_line("good")
WRONG: list[tuple[str, bytes, list[tuple[str, int | None, str | None]]]] = [
    ("empty", b"", [("empty_file", None, None)]),
    ("blank", b"\n \n", [("empty_file", None, None)]),
    ("no JSON", jsonl(GOOD, b"{nonsense\n"), [("invalid_json_line", 2, None)]),
    ("no UTF-8", b'{"custom_id": "\xff"}\n', [("invalid_json_line", 1, None)]),
    ("an array", b"[1]\n", [("invalid_request", 1, None)]),
    (
        "deep",
        b'{"custom_id":"a","method":"POST","url":"/","body":{"a":' + b"[" * 9999,
        [("invalid_json_line", 1, None)],
    ),
    ("no id", jsonl({"method": "POST", "url": CHAT, "body": {}}), [("missing_required_parameter", 1, "custom_id")]),
    ("no body", jsonl({"custom_id": "x", "method": "POST", "url": CHAT}), [("missing_required_parameter", 1, "body")]),
    ("empty id", jsonl(chat_line("")), [("invalid_request", 1, "custom_id")]),
    ("number as id", jsonl(chat_line("x") | {"custom_id": 1}), [("invalid_request", 1, "custom_id")]),
    ("body as text", jsonl(chat_line("x") | {"body": "{}"}), [("invalid_request", 1, "body")]),
    ("GET", jsonl(GOOD, chat_line("x") | {"method": "GET"}), [("invalid_method", 2, "method")]),
    ("other url", jsonl(chat_line("x") | {"url": COMPLETIONS}), [("invalid_url", 1, "url")]),
    ("streamed", jsonl(chat_line("x", stream=True)), [("invalid_request", 1, "body.stream")]),
    ("other model", jsonl(chat_line("x", model="gpt-9")), [("model_not_found", 1, "body.model")]),
    ("twice", jsonl(GOOD, b"\n", GOOD, chat_line("b")), [("duplicate_custom_id", 3, "custom_id")]),
    ("two", jsonl(b"x\n", GOOD, GOOD), [("invalid_json_line", 1, None), ("duplicate_custom_id", 3, "custom_id")]),
]


@pytest.mark.parametrize(("content", "errors"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_files_that_fail(with_client: Any, content: bytes, errors: list[Any]) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        file = await upload(client, content)
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batch = await ended(client, batch.id)
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors.object == "list"
        assert [(e.code, e.line, e.param) for e in batch.errors.data] == errors
        assert all(e.message for e in batch.errors.data)
        assert (batch.output_file_id, batch.error_file_id, batch.request_counts.total) == (None, None, 0)

    with_client(scenario)


def test_bounds_of_a_file(with_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_LINES", 3)
    monkeypatch.setattr(validation, "MAX_ERRORS", 2)
    monkeypatch.setattr(upload_module, "MAX_FILE_BYTES", 2000)

    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        three = [chat_line(str(i)) for i in range(3)]
        assert (await ended(client, (await create(client, *three)).id)).status == "completed"
        for lines, errors in (
            ([*three, chat_line("3")], [("too_many_tasks", 4)]),
            ([b"x\n"] * 3, [("invalid_json_line", 1), ("invalid_json_line", 2)]),
            ([chat_line("long", "x" * 700)], [("line_too_long", 1)]),
        ):
            batch = await ended(client, (await create(client, *lines)).id)
            assert [(e.code, e.line) for e in batch.errors.data] == errors
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(client, b"x" * 2001)
        assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
        with pytest.raises(openai.APIStatusError) as caught:
            await upload(client, b"x" * 100_000)
        assert caught.value.status_code == 413
        assert len([file async for file in client.files.list(purpose="batch")]) == 4

    with_client(scenario, max_body_bytes=700)


def test_pages(with_client: Any) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        files = [(await upload(client, b"x", f"{i}.jsonl")).id for i in range(5)]
        assert [file.id async for file in client.files.list(limit=2)] == files[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == files
        page = await client.files.list(limit=2, order="asc", after=files[0])
        assert ([file.id for file in page.data], page.has_more) == (files[1:3], True)
        assert (page.first_id, page.last_id) == (files[1], files[2])
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        batches = [(await create(client, chat_line("x"))).id for _ in range(3)]
        assert [batch.id async for batch in client.batches.list(limit=1)] == batches[::-1]
        page = await client.batches.list(after=batches[1])
        assert ([batch.id for batch in page.data], page.has_more) == (batches[:1], False)
        for query in ("limit=0", "limit=x", "limit=101", "limit=-1", "order=up", "after=nobody", f"after={files[0]}"):
            status, answer = await world.get(f"/v1/batches?{query}")
            assert status == 400
            assert answer["error"]["param"] == query.partition("=")[0]

    with_client(scenario)


def test_files_are_kept_private_and_deleted(with_client: Any, tmp_path: Path) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        names = ("../../etc/passwd", "etc/passwd", "a\u00e9.jsonl", "x" * 900)
        files = [await upload(client, b"bytes\x00\xff", name) for name in names]
        assert [file.filename for file in files[:3]] == list(names[:3])
        assert len(files[3].filename) == 255
        folder = tmp_path / "kept" / "batches"
        kept = {path.name for path in (folder / "files").iterdir()}
        assert kept == {file.id for file in files}
        for path in (folder, folder / "files"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {stat.S_IMODE((folder / "files" / name).stat().st_mode) for name in kept} == {0o600}
        assert (await client.files.content(files[0].id)).content == b"bytes\x00\xff"
        assert (await client.files.retrieve(files[0].id)).bytes == 7
        assert (await client.files.delete(files[0].id)).deleted
        for gone in (files[0].id, "file-nobody", ".new-x", "..%2flock", "lock", "%2e%2e"):
            for path in (gone, f"{gone}/content"):
                assert (await world.get(f"/v1/files/{path}"))[0] == 404
        with pytest.raises(openai.NotFoundError):
            await client.files.delete(files[0].id)
        assert len(list((folder / "files").iterdir())) == 3

    with_client(scenario)


def test_files_expire(with_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were deleted then; one whose batch runs is read to its end."""

    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        after = {"anchor": "created_at", "seconds": 3600}
        content = jsonl(chat_line("x"))
        kept = await upload(client, content)
        file = await client.files.create(file=("a", content), purpose="batch", expires_after=after)
        assert (kept.expires_at, file.expires_at) == (None, file.created_at + 3600)
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        batches, now = world.gateway.batches, world.gateway.batches.now()
        monkeypatch.setattr(batches, "now", lambda: now + 3595)
        assert (await client.files.retrieve(file.id)).id == file.id
        monkeypatch.setattr(batches, "now", lambda: now + 3601)
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)
        batch = await ended(client, batch.id)
        assert batch.request_counts.completed == 1
        listed = {found.id async for found in client.files.list()}
        assert listed == {kept.id, batch.output_file_id}
        assert {path.name for path in (tmp_path / "kept" / "batches" / "files").iterdir()} == listed

    with_client(scenario)


def test_a_key_sees_only_its_own(with_client: Any) -> None:
    async def scenario(world: Any, one: openai.AsyncOpenAI) -> None:
        batch = await ended(one, (await create(one, chat_line("x"))).id)
        async with client_of(world, KEYS[1]) as two:
            assert [file async for file in two.files.list()] == []
            assert [found async for found in two.batches.list()] == []
            for ask in (
                lambda: two.files.retrieve(batch.output_file_id),
                lambda: two.files.content(batch.output_file_id),
                lambda: two.files.delete(batch.output_file_id),
                lambda: two.batches.retrieve(batch.id),
                lambda: two.batches.cancel(batch.id),
                lambda: two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
                lambda: two.files.list(after=batch.output_file_id),
            ):
                with pytest.raises(openai.APIStatusError) as caught:
                    await ask()
                assert caught.value.status_code in (400, 404)
        assert (await one.files.retrieve(batch.output_file_id)).id == batch.output_file_id

    with_client(scenario, api_key_digests=tuple(map(digest_of, KEYS)))


def test_what_a_batch_cannot_be(with_client: Any) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        file = await upload(client, jsonl(GOOD))
        good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for change, status, param in (
            ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
            ({"completion_window": "1h"}, 400, "completion_window"),
            ({"input_file_id": "file-nobody"}, 404, "input_file_id"),
            ({"input_file_id": None}, 400, "input_file_id"),
            ({"metadata": {"a": 1}}, 400, "metadata"),
            ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
        ):
            got, answer = await world.answer_to("/v1/batches", good | change)
            assert (got, answer["error"]["param"]) == (status, param), change
        batch = await ended(client, (await client.batches.create(**good)).id)
        again = good | {"input_file_id": batch.output_file_id}
        assert (await world.answer_to("/v1/batches", again))[0] == 400
        got, answer = await world.answer_to(f"/v1/batches/{batch.id}/cancel", {})
        assert (got, answer["error"]["message"][:23]) == (409, "this batch is completed")
        assert (await world.get("/v1/batches/batch_nobody"))[0] == 404

    with_client(scenario)


def _form(*parts: tuple[str, Any, str | None]) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name, value, filename in parts:
        form.add_field(name, value, filename=filename)
    return form


def _expiry(anchor: str, seconds: str) -> list[tuple[str, str, None]]:
    return [("expires_after[anchor]", anchor, None), ("expires_after[seconds]", seconds, None)]


def test_forms_that_are_none(with_client: Any, tmp_path: Path) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        file, purpose = ("file", b"x", "x.jsonl"), ("purpose", "batch", None)
        cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
        multipart = {"Content-Type": "multipart/form-data; boundary=b"}
        for data, headers, status in (
            (_form(purpose, file), {}, 200),
            (_form(file, purpose), {}, 200),
            (_form(file), {}, 400),
            (_form(purpose, ("other", b"x", "y")), {}, 400),
            (_form(("purpose", "fine-tune", None), file), {}, 400),
            (_form(purpose, file, file), {}, 400),
            (_form(purpose, file, ("expires_after[seconds]", "3600", None)), {}, 400),
            (_form(purpose, file, ("expires_after[anchor]", "created_at", None)), {}, 400),
            (_form(purpose, file, *_expiry("last_used_at", "3600")), {}, 400),
            (_form(purpose, file, *_expiry("created_at", "3599")), {}, 400),
            (_form(purpose, file, *_expiry("created_at", "2592001")), {}, 400),
            (_form(purpose, file, *_expiry("created_at", "-3600")), {}, 400),
            (_form(purpose, file, *_expiry("created_at", "\N{SUPERSCRIPT TWO}000000")), {}, 400),
            (_form(("purpose", "x" * 2000, None), file), {}, 400),
            (_form(*[("purpose", "batch", None)] * 20, file), {}, 400),
            (b"nothing", {"Content-Type": "multipart/form-data"}, 400),
            (b"nothing", {"Content-Type": "application/json"}, 400),
            (b"nothing", multipart, 400),
            (b"", multipart, 400),
            (cut, multipart, 400),
        ):
            async with world.http.post(f"{world.url}/v1/files", data=data, headers=headers) as response:
                assert response.status == status, await response.text()
                assert ("error" in await response.json()) is (status != 200)
        assert len([found async for found in client.files.list()]) == 2
        await world_settled(tmp_path / "kept" / "batches" / "files", 2)

    async def world_settled(folder: Path, count: int) -> None:
        async with asyncio.timeout(10):
            while len(list(folder.iterdir())) != count:
                await asyncio.sleep(0.01)

    with_client(scenario)


@pytest.mark.slow  # lines wait as long as a client without a worker is told to
def test_a_drain_waits_for_no_line_and_the_next_gateway_goes_on(in_world: Any, tmp_path: Path) -> None:
    """Lines of a large batch, all on workers that answer none, and a live request that is waited for."""
    batch_ids = []

    async def first(world: Any) -> None:
        _, decode = await world.pair(auto=False)
        async with client_of(world) as client:
            batch = await create(client, *(chat_line(f"{i}") for i in range(100)))
            batch_ids.append(batch.id)
            async with asyncio.timeout(10):
                while len(decode.of(GenerateRequest)) < 3:
                    await asyncio.sleep(0.001)
                live = asyncio.create_task(world.answer_to(COMPLETIONS, {"prompt": "live"}))
                while not any(not m.request.urgency.is_batch for m in decode.of(GenerateRequest)):
                    await asyncio.sleep(0.001)
                draining = asyncio.create_task(world.gateway.drain(100))
                while world.gateway.dispatcher.num_in_flight + world.gateway.dispatcher.num_queued > 1:
                    await asyncio.sleep(0.001)
                assert not draining.done()
                decode.finish(decode.request_id)
                assert (await live)[0] == 200
                await draining
            found = await client.batches.retrieve(batch.id)
            assert (found.status, found.request_counts.completed) == ("in_progress", 0)
            assert (await world.answer_to("/v1/batches", {}))[0] == 503

    async def second(world: Any) -> None:
        async with client_of(world) as client:
            # It waits for workers, which come later than the gateway.
            assert (await client.batches.retrieve(batch_ids[0])).status == "in_progress"
            await world.pair()
            batch = await ended(client, batch_ids[0])
            assert batch.request_counts.completed == 100

    for scenario in (first, second):
        in_world(scenario, batch_dir=str(tmp_path / "batches"))


def test_without_a_folder_nothing_is_served(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/files/x/content", "/v1/batches/x"):
            status, answer = await world.get(path)
            assert status == 404
            assert "--batch-dir" in answer["error"]["message"]

    in_world(scenario)


def test_nothing_is_made_before_it_is_used(with_client: Any, tmp_path: Path) -> None:
    async def scenario(world: Any, client: openai.AsyncOpenAI) -> None:
        assert not (tmp_path / "kept").exists()

    with_client(scenario)
