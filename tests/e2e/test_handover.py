"""One prefill and one decode process over a tiny model: what is computed where, what is shared, what is given back.

Every prompt is handed over, as `--local-prefill never` demands, but for one test's on a server that may choose.
"""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_SIZE = 16
FLAGS = ["--kv-memory", "2M", "--token-budget", "32", "--dtype", "float32", "--block-size", str(BLOCK_SIZE)]


@pytest.fixture(scope="module")
def server(serve, tiny_model) -> Iterator:
    """A small pool and small steps, so that queues, hand-overs and preemption all happen."""
    with serve(tiny_model, *FLAGS, "--local-prefill", "never") as running:
        yield running
        running.require_handed_over()


@pytest.fixture(autouse=True)
def leaves_nothing(server) -> Iterator[None]:
    """Every test ends with an idle ledger that equals the start after a flush."""
    server.wait_idle()
    server.flush()
    before = server.ledger()
    yield
    server.wait_idle()
    server.flush()
    assert server.ledger() == before


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 320) for _ in range(num_tokens)]


def computed_tokens(server) -> int:
    """Asked when idle: the workers' counters come with the ledger at the latest."""
    server.wait_idle()
    return int(server.metric("baton_worker_tokens_computed_total"))


def test_the_prompt_is_computed_by_prefill_and_only_there(server) -> None:
    before = server.metric("baton_worker_kv_sent_bytes_total"), computed_tokens(server)
    answer = server.complete(prompt(1, 100), 5, ignore_eos=True)
    server.wait_idle()
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers x (key, value) x heads x head_dim x float32
    assert server.metric("baton_worker_kv_sent_bytes_total") - before[0] == 100 * bytes_per_token
    # The first of the five tokens comes from the handed-over hidden state, each of the others from one decode step.
    assert computed_tokens(server) - before[1] == 100 + 4
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_repeated_prompt_is_cached_up_to_its_last_block(server) -> None:
    first = server.complete(prompt(2, 96), 4, ignore_eos=True)
    before = computed_tokens(server)
    second = server.complete(prompt(2, 96), 4, ignore_eos=True)
    server.wait_idle()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 96 - BLOCK_SIZE <= cached < 96
    assert computed_tokens(server) - before == 96 - cached + 3
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


@pytest.mark.parametrize("num_new", [9, 400])
def test_the_second_turn_computes_only_what_is_new(server, num_new) -> None:
    """Prefill gets the answer's KV back from decode, for a short rest too."""
    first_prompt = prompt(3, 70)
    answer = server.token_ids(first_prompt, 30)
    second_prompt = first_prompt + answer + prompt(4, num_new)
    server.wait_idle()
    before, returned = computed_tokens(server), server.routed()["returned"]
    second = server.complete(second_prompt, 1, ignore_eos=True)
    server.wait_idle()
    assert server.routed()["returned"] == returned + 1
    bound = num_new + BLOCK_SIZE
    assert len(second_prompt) - second["usage"]["prompt_tokens_details"]["cached_tokens"] <= bound
    assert computed_tokens(server) - before <= bound


def test_where_the_router_may_choose_an_idle_decode_worker_computes_a_short_rest_itself(serve, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as chooses:
        first_prompt = prompt(3, 70)
        second_prompt = first_prompt + chooses.token_ids(first_prompt, 30) + prompt(4, 9)
        chooses.wait_idle()
        before, sent = computed_tokens(chooses), chooses.metric("baton_worker_kv_sent_bytes_total")
        local = chooses.routed()["local"]
        chooses.complete(second_prompt, 1, ignore_eos=True)
        assert computed_tokens(chooses) - before <= 9 + BLOCK_SIZE
        assert chooses.routed()["local"] == local + 1
        assert chooses.metric("baton_worker_kv_sent_bytes_total") == sent


def test_the_second_turn_of_a_chat_computes_only_what_is_new(server) -> None:
    """Through the chat template, where the answer's text is tokenised anew."""
    messages = [{"role": "user", "content": "what is the capital of the world and in the world of the other"}]
    body = {"model": server.model, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    _, first = server.request("POST", "/v1/chat/completions", body | {"messages": messages})
    turn_1 = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and of the moon?"}]
    messages[1] = {"role": "assistant", "content": messages[1]["content"]}
    server.wait_idle()
    before = computed_tokens(server)
    _, second = server.request("POST", "/v1/chat/completions", body | {"messages": messages, "max_tokens": 1})
    turn_2 = second["prompt_token_ids"]
    common = next(
        (i for i, (a, b) in enumerate(zip(turn_1, turn_2, strict=False)) if a != b), min(len(turn_1), len(turn_2))
    )
    bound = len(turn_2) - common + BLOCK_SIZE
    assert len(turn_2) - second["usage"]["prompt_tokens_details"]["cached_tokens"] <= bound
    server.wait_idle()
    assert computed_tokens(server) - before <= bound


def test_equal_prompts_at_once_give_equal_answers(server) -> None:
    solo = server.token_ids(prompt(5, 60), 20)
    server.wait_idle()
    server.flush()
    assert server.all_token_ids([prompt(5, 60)] * 8, 20, at_once=8) == [solo] * 8


def test_shared_prefixes_at_once_equal_each_alone(server) -> None:
    shared = prompt(6, 48)
    prompts = [shared + prompt(100 + i, 5 + 3 * i) for i in range(8)]
    alone = []
    for one in prompts:
        alone.append(server.token_ids(one, 12))
        server.wait_idle()
        server.flush()
    assert server.all_token_ids(prompts, 12, at_once=8) == alone


def test_more_than_the_pool_holds_is_preempted_and_still_exact(server) -> None:
    prompts = [prompt(200 + i, 60) for i in range(16)]
    alone = [server.token_ids(one, 120) for one in prompts[:4]]
    server.wait_idle()
    server.flush()
    assert server.all_token_ids(prompts, 120, at_once=16)[:4] == alone


def test_random_aborts_at_every_phase_leave_nothing(server) -> None:
    """200 requests; about half are left by their client: before the first byte, while waiting, in mid-stream."""
    generator = random.Random(7)
    jobs = [
        (i, generator.choice(("finish", "at once", "later", "first", "some")), generator.random()) for i in range(200)
    ]

    def run(job: tuple[int, str, float]) -> None:
        seed, leave, moment = job
        with server.stream(prompt(300 + seed % 40, 20 + 11 * (seed % 40)), 20, ignore_eos=True) as events:
            if leave == "at once":
                return
            if leave == "later":
                threading.Event().wait(0.2 * moment)  # not to wait for something: to leave at a random moment
                return
            for i, event in enumerate(events):
                if event == "[DONE]" or (leave == "first" and i == 0) or (leave == "some" and i == 8):
                    return
                assert "error" not in json.loads(event), event

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(run, jobs))
    server.wait_idle()
    for worker in server.ledger()["workers"].values():
        assert worker["idle"], worker
