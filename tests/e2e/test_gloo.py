"""A server whose KV travels through gloo groups: the same tokens as over shared memory, also after a worker died."""

import os
import random
import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--kv-memory", "2M", "--token-budget", "64", "--dtype", "float32", "--local-prefill", "never")


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(3, 320) for _ in range(num)] for num in (1, 17, 64, 150, 200, 33, 90, 128)]


def test_gloo_hands_over_what_shared_memory_hands_over(serve, tiny_model) -> None:
    found, sent = {}, {}
    for transport in ("shared_memory", "gloo"):
        with serve(tiny_model, *FLAGS, "--transport", transport) as server:
            found[transport] = server.all_token_ids(prompts(), 12, 4)
            server.require_handed_over()
            sent[transport] = server.metric("baton_worker_kv_sent_bytes_total")
            assert transport.replace("_", " ") in server.log  # in the table
            assert "any more" not in server.log  # no pair fell back
    assert found["gloo"] == found["shared_memory"]
    assert sent["gloo"] == sent["shared_memory"] > 0


def test_a_new_prefill_worker_forms_a_new_group(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS, "--transport", "gloo") as server:
        before = server.all_token_ids(prompts(), 12, 4)
        server.flush()
        old = server.children()["prefill-0"]
        os.kill(old, signal.SIGKILL)
        assert server.all_token_ids(prompts(), 12, 4) == before
        serving.wait_until(lambda: server.children().get("prefill-0", old) != old, "prefill is started again")
        serving.wait_until(lambda: server.request("GET", "/ready")[0] == 200, "all is ready again", 60.0)
        server.wait_idle()
        server.flush()
        sent = server.metric("baton_worker_kv_sent_bytes_total")
        assert server.all_token_ids(prompts(), 12, 4) == before
        server.wait_idle()
        assert server.metric("baton_worker_kv_sent_bytes_total") > sent
