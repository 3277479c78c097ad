"""n > 1 on real servers: one prefill and one hand-over for all choices, and the same choices in every topology."""

import json
import os
import random
import signal
from collections import defaultdict
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ["--dtype", "float32", "--block-size", "16", "--local-prefill", "never"]
SAMPLED = {"temperature": 1.0, "seed": 5, "ignore_eos": True}


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 320) for _ in range(num_tokens)]


def choices(server, token_ids: list[int], max_tokens: int, n: int, **fields: Any) -> list[list[int]]:
    answer = server.complete(token_ids, max_tokens, n=n, return_token_ids=True, **(SAMPLED | fields))
    assert [choice["index"] for choice in answer["choices"]] == list(range(n))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == len(token_ids)
    assert answer["usage"]["completion_tokens"] == n * max_tokens
    return [choice["token_ids"] for choice in answer["choices"]]


def test_the_prompt_is_computed_and_handed_over_once(serve, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        server.wait_idle()
        before = [server.metric(f"baton_worker_{name}_total") for name in ("kv_sent_bytes", "tokens_computed")]
        answers = choices(server, prompt(1, 100), 5, n=4)
        server.wait_idle()
        after = [server.metric(f"baton_worker_{name}_total") for name in ("kv_sent_bytes", "tokens_computed")]
        bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers x (key, value) x heads x head_dim x float32
        sent, computed = [a - b for a, b in zip(after, before, strict=True)]
        # Of the five tokens of each choice, the first comes from the hidden state that was handed over.
        assert computed == 100 + 4 * 4
        assert sent == 100 * bytes_per_token
        assert len({tuple(answer) for answer in answers}) == 4


def test_choices_are_the_same_in_every_topology_cold_and_warm(serve, tiny_model) -> None:
    prompts = [prompt(seed, num_tokens) for seed, num_tokens in enumerate((1, 16, 33, 90))]
    found = []
    for topology in ((0, 1), (1, 1), (2, 2)):
        flags = ["--prefill", str(topology[0]), "--decode", str(topology[1])]
        with serve(tiny_model, *FLAGS, *flags) as server:
            for _ in ("cold", "warm"):
                found.append([choices(server, one, 12, n=3) for one in prompts])
                greedy = choices(server, prompts[2], 6, n=2, temperature=0)
                assert greedy[0] == greedy[1]
            if topology[0]:
                server.require_handed_over()
    assert all(answers == found[0] for answers in found)


def test_more_choices_than_places_and_than_the_pool_holds(serve, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        wanted = choices(server, prompt(7, 50), 40, n=12)
    with serve(tiny_model, *FLAGS, "--max-running", "3", "--kv-memory", "256K") as server:
        assert choices(server, prompt(7, 50), 40, n=12) == wanted
        server.require_handed_over()


def test_every_choice_goes_on_exactly_when_its_worker_dies(serve, tiny_model) -> None:
    with serve(tiny_model, *FLAGS, "--prefill", "1", "--decode", "2") as server:
        wanted = choices(server, prompt(9, 60), 200, n=3)
        found: dict[int, list[int]] = defaultdict(list)
        killed, finishes = False, []
        with server.stream(prompt(9, 60), 200, n=3, return_token_ids=True, **SAMPLED) as events:
            for data in events:
                if data == "[DONE]":
                    break
                for choice in json.loads(data)["choices"]:
                    found[choice["index"]] += choice.get("token_ids") or []
                    finishes += [choice["index"]] if choice["finish_reason"] else []
                if not killed and all(len(found[index]) > 5 for index in range(3)):
                    killed = True
                    ledgers = server.ledger()["workers"]
                    busy = max(("decode-0", "decode-1"), key=lambda name: ledgers[name]["requests"])
                    os.kill(server.children()[busy], signal.SIGKILL)
        assert killed
        assert [found[index] for index in range(3)] == wanted
        assert sorted(finishes) == [0, 1, 2]
