"""Batches on a real server by the official client: beside live traffic, and over kills of the gateway."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COMPLETIONS = "/v1/completions"
NUM_LINES = 240
NUM_KILLS = 3
Serve = Callable[..., AbstractContextManager[Any]]


def test_a_killed_gateway_goes_on_where_it_stopped(
    serve: Serve, serving: Any, tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["--dtype", "float32", "--kv-memory", "8M", "--batch-dir", str(tmp_path / "kept")]
    with serve(tiny_model, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        prompts = [[3 + i % 300, 5 + i // 300, 7] * 4 for i in range(NUM_LINES)]
        options = {"model": server.model, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        lines = [
            {"custom_id": f"line-{i}", "method": "POST", "url": COMPLETIONS, "body": options | {"prompt": prompt}}
            for i, prompt in enumerate(prompts)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")

        def counted() -> Any:
            """The batch as the server says, also while it starts again; None: no answer now."""
            try:
                return client.batches.retrieve(batch.id)
            except (openai.APIConnectionError, openai.InternalServerError):
                return None

        completed = 0
        for _ in range(NUM_KILLS):

            def got_on(more_than: int = completed) -> bool:
                found = counted()
                return found is not None and found.request_counts.completed > more_than

            serving.wait_until(got_on, "some more lines are done", 40)
            completed = client.batches.retrieve(batch.id).request_counts.completed
            assert completed < NUM_LINES
            old = server.children()["gateway"]
            os.kill(old, signal.SIGKILL)
            serving.wait_until(lambda old=old: server.children().get("gateway", old) != old, "the gateway is restarted")
        serving.wait_until(lambda: (found := counted()) is not None and found.status == "completed", "it ends", 90)
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES, 0)
        outputs = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        assert [line["custom_id"] for line in outputs] == [f"line-{i}" for i in range(NUM_LINES)]
        for i in (0, 1, NUM_LINES // 2, NUM_LINES - 1):  # the same as they are answered live
            live = client.completions.create(
                model=server.model, prompt=prompts[i], max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
            )
            assert outputs[i]["response"]["body"]["choices"][0]["text"] == live.choices[0].text
