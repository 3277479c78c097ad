"""`--elastic` on a real server: a prefill worker takes up decoding where decoding is what is short."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FLAGS = ["--dtype", "float32", "--kv-memory", "8M", "--elastic"]


def ask_until_roles_are(roles: list[str], server: Any, serving: Any) -> dict[str, Any]:
    """Eight clients with long answers, which never change, until prefill-0 has these roles; what `GET /roles` says."""
    generator = random.Random(6)
    prompts = [[generator.randrange(3, 320) for _ in range(20)] for _ in range(8)]
    alone = [server.token_ids(prompt, 200) for prompt in prompts]
    helped = threading.Event()

    def ask(index: int) -> int:
        count = 0
        while not helped.is_set():
            assert server.token_ids(prompts[index], 200) == alone[index]
            count += 1
        return count

    def helps() -> bool:
        return server.request("GET", "/roles")[1]["workers"]["prefill-0"] == roles

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, index) for index in range(len(prompts))]
        try:
            serving.wait_until(helps, f"prefill-0 is {roles}", 40)
        finally:
            helped.set()
        assert all(future.result(60) for future in asking)
    return server.request("GET", "/roles")[1]


def test_a_queue_for_places_to_decode_brings_help(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS, "--max-running", "1") as server:
        answer = ask_until_roles_are(["prefill", "decode"], server, serving)
        assert "the decode pool's predicted wait" in answer["changes"][0]["reason"]
        assert server.metric("baton_role_changes_total") == 1
        assert "roles of prefill-0: prefill -> prefill+decode" in server.log


def test_with_both_targets_long_answers_make_a_prefill_worker_a_decode_worker(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS, "--ttft-target", "5s", "--tpot-target", "500ms") as server:
        answer = ask_until_roles_are(["decode"], server, serving)
        assert "0 prefill + 2 decode are predicted to keep both targets" in answer["changes"][0]["reason"]
        assert "roles of prefill-0: prefill -> decode" in server.log
        assert len(server.token_ids(list(range(3, 40)), 20)) == 20, "nobody has the prefill role now"
