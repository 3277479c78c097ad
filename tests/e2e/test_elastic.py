"""`--elastic` on a real server: a prefill worker takes up decoding while requests queue for places to decode."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FLAGS = ["--dtype", "float32", "--kv-memory", "8M", "--max-running", "1", "--elastic"]


def test_a_queue_for_places_to_decode_brings_help(serve, serving, tiny_model) -> None:
    generator = random.Random(6)
    prompts = [[generator.randrange(3, 320) for _ in range(20)] for _ in range(8)]
    with serve(tiny_model, *FLAGS) as server:
        alone = [server.token_ids(prompt, 200) for prompt in prompts]
        helped = threading.Event()

        def ask(index: int) -> int:
            count = 0
            while not helped.is_set():
                assert server.token_ids(prompts[index], 200) == alone[index]
                count += 1
            return count

        def helps() -> bool:
            return server.request("GET", "/roles")[1]["workers"]["prefill-0"] == ["prefill", "decode"]

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask, index) for index in range(len(prompts))]
            try:
                serving.wait_until(helps, "prefill-0 decodes too", 40)
            finally:
                helped.set()
            assert all(future.result(60) for future in asking)
        answer = server.request("GET", "/roles")[1]
        assert "the decode pool's predicted wait" in answer["changes"][0]["reason"]
        assert server.metric("baton_role_changes_total") == 1
        assert "roles of prefill-0: prefill -> prefill+decode" in server.log
