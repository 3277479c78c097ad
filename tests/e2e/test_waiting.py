"""A server that is full: a pool too small for what it accepted, who overtakes whom, and what is told to those who wait.

One prefill and one decode process, four running requests, a pool of 64 blocks of 16 tokens.
"""

import http.client
import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ["--kv-memory", "512K", "--block-size", "16", "--max-running", "4", "--dtype", "float32"]
BLOCKS = 64
BOUND_S = 60.0


@pytest.fixture(scope="module")
def server(serve, tiny_model) -> Iterator:
    with serve(tiny_model, *FLAGS) as running:
        yield running


@pytest.fixture(autouse=True)
def leaves_nothing(server) -> Iterator[None]:
    server.wait_idle()
    server.flush()
    yield
    server.wait_idle()


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 320) for _ in range(num_tokens)]


def num_queued(server) -> float:
    return server.metric("baton_queue_length")


def test_a_tiny_pool_finishes_what_grows_beyond_it(server, serving) -> None:
    """Four requests of 10 blocks that grow to 40, in a pool of 64: each gets the tokens that it gets alone."""
    assert server.request("GET", "/workers")[1]["workers"][0]["kv_tokens"] == BLOCKS * 16
    prompts = [prompt(i, 10 * 16) for i in range(4)]
    alone = []
    for one in prompts:
        alone.append(server.token_ids(one, 30 * 16))
        server.wait_idle()
        server.flush()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.token_ids, one, 30 * 16) for one in prompts]
        while not all(map(Future.done, running)):
            generated = server.metric("baton_worker_tokens_generated_total")

            def moves(generated: float = generated) -> bool:
                done = all(map(Future.done, running))
                return done or server.metric("baton_worker_tokens_generated_total") > generated

            serving.wait_until(moves, "requests run, so tokens come", timeout_s=10)
        assert [one.result() for one in running] == alone


def test_a_high_priority_overtakes_those_who_wait(server, serving) -> None:
    finished: list[str] = []

    def run(name: str, seed: int, num_tokens: int, priority: int) -> None:
        server.complete(prompt(seed, 20), num_tokens, ignore_eos=True, priority=priority)
        finished.append(name)

    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(run, "running", 100 + i, 100 + 40 * i, 0) for i in range(4)]
        serving.wait_until(lambda: server.metric("baton_worker_requests_running") >= 4, "the server is full")
        jobs += [pool.submit(run, "waiting", 110 + i, 40, 0) for i in range(8)]
        serving.wait_until(lambda: num_queued(server) >= 6, "the others wait")
        jobs.append(pool.submit(run, "high", 120, 40, -2))
        for job in jobs:
            job.result(BOUND_S)
    # Two may have been sent to the workers before it came, and one may have joined together with it.
    assert finished[: finished.index("high")].count("waiting") <= 3, finished


def test_two_keys_get_the_same_service_whatever_they_offer(server, serving) -> None:
    """One key offers a hundred requests and the other ten; while both wait, each gets as many tokens."""
    few = 10
    finished: list[str] = []

    def run(key: str, seed: int) -> None:
        server.complete(prompt(seed, 20), 12, key=key, ignore_eos=True)
        finished.append(key)

    with ThreadPoolExecutor(11 * few) as pool:
        jobs = [pool.submit(run, "a", 200 + i) for i in range(10 * few)]
        serving.wait_until(lambda: num_queued(server) >= 6 * few, "most of the first key's requests wait")
        before = len(finished)
        jobs += [pool.submit(run, "b", 400 + i) for i in range(few)]
        for job in jobs:
            job.result(BOUND_S)
    last = len(finished) - 1 - finished[::-1].index("b")
    num_others = finished[before:last].count("a")
    # A few ran already, or were sent out, when the other key came.
    assert few - 4 <= num_others <= few + 10, finished


@contextmanager
def always_busy(server, serving) -> Iterator[None]:
    """More high-priority requests than can run, one after the other, until the block ends."""
    stop = threading.Event()

    def run(seed: int) -> None:
        while not stop.is_set():
            server.complete(prompt(seed, 20), 60, ignore_eos=True, priority=-2)

    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(run, 500 + i) for i in range(16)]
        try:
            serving.wait_until(lambda: num_queued(server) >= 8, "the server is full")
            yield
        finally:
            stop.set()
        for job in jobs:
            job.result(BOUND_S)


def test_who_waits_is_told_its_place(server, serving) -> None:
    """In comments and headers; the official client takes the comments for nothing."""
    expected = server.complete(prompt(600, 30), 8, ignore_eos=True)["choices"][0]["text"]

    def with_the_client() -> str:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="c", max_retries=0, timeout=BOUND_S)
        with client:
            answer = client.completions.create(
                model=server.model,
                prompt=prompt(600, 30),
                max_tokens=8,
                temperature=0,
                stream=True,
                extra_body={"priority": 2, "ignore_eos": True},
            )
            return "".join(chunk.choices[0].text for chunk in answer if chunk.choices)

    body = {"model": server.model, "prompt": prompt(600, 30), "max_tokens": 8, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND_S)
    with ThreadPoolExecutor(1) as pool:
        with always_busy(server, serving):
            theirs = pool.submit(with_the_client)
            connection.request("POST", "/v1/completions", json.dumps(body | {"priority": 2, "ignore_eos": True}))
            response = connection.getresponse()
            assert response.status == 200
            assert int(response.headers["X-Queue-Position"]) >= 1
            told = next(response).decode()
        assert re.fullmatch(r": queue position \d+(, estimated start in \d+\.\d s)?\n", told), told
        data = [line[6:] for line in response if line.startswith(b"data: ")]
        assert theirs.result(BOUND_S) == expected
    connection.close()
    assert data[-1].strip() == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in data[:-1]) == expected
