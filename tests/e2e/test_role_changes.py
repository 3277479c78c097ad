"""Workers change roles while requests run: no request fails, no token differs, nothing is left behind."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FLAGS = ["--dtype", "float32", "--token-budget", "32", "--kv-memory", "8M"]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server(serve, tiny_model):
    with serve(tiny_model, *FLAGS, "--local-prefill", "never") as server:
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = random.Random(4)
    return [[generator.randrange(3, 320) for _ in range(20 + 13 * (i % 8))] for i in range(16)]


@pytest.fixture(scope="module")
def alone(server, prompts) -> list[list[int]]:
    return [server.token_ids(prompt, NUM_TOKENS) for prompt in prompts]


def set_roles(server, worker: str, roles: str) -> None:
    status, answer = server.request("POST", "/roles", {"worker": worker, "roles": roles.split("+")})
    assert (status, "+".join(answer["workers"][worker])) == (200, roles), answer


def num_generated(server, worker: str) -> float:
    _, text = server.request("GET", "/metrics")
    found = re.search(rf'^baton_worker_tokens_generated_total{{[^}}]*worker="{worker}"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


class Load:
    """Requests from many threads until it is left; every answer must be right."""

    def __init__(self, server, prompts, alone):
        self._server, self._prompts, self._alone = server, prompts, alone
        self._stop = threading.Event()
        self.num_answers = 0

    def __enter__(self) -> "Load":
        self._pool = ThreadPoolExecutor(6)
        self._workers = [self._pool.submit(self._run, seed) for seed in range(6)]
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for worker in self._workers:
            worker.result(60)
        self._pool.shutdown()

    def _run(self, seed: int) -> None:
        generator = random.Random(seed)
        while not self._stop.is_set():
            i = generator.randrange(len(self._prompts))
            assert self._server.token_ids(self._prompts[i], NUM_TOKENS) == self._alone[i]
            self.num_answers += 1

    def pass_some(self, serving, count: int = 12) -> None:
        """Wait until so many more answers were right."""
        until = self.num_answers + count

        def enough() -> bool:
            for worker in self._workers:
                assert not worker.done() or worker.result() is None
            return self.num_answers >= until

        serving.wait_until(enough, f"{count} more answers", 30)


def test_roles_go_back_and_forth_under_load(server, serving, prompts, alone) -> None:
    server.flush()
    before = num_generated(server, "prefill-0")
    with Load(server, prompts, alone) as load:
        load.pass_some(serving)
        assert num_generated(server, "prefill-0") == before
        set_roles(server, "prefill-0", "prefill+decode")
        serving.wait_until(lambda: num_generated(server, "prefill-0") > before + NUM_TOKENS, "prefill-0 generates")
        for worker, roles in (
            ("decode-0", "prefill+decode"),
            ("prefill-0", "decode"),
            ("decode-0", "prefill"),  # swapped
            ("decode-0", "decode"),  # nobody prefills for others
            ("prefill-0", "prefill"),  # as at the start
            ("prefill-0", "prefill+decode"),
            ("decode-0", "prefill+decode"),
            ("decode-0", "decode"),
            ("prefill-0", "prefill"),
        ):
            set_roles(server, worker, roles)
            server.flush()  # or nothing would be computed any more
            load.pass_some(serving)
            assert server.request("GET", "/ready")[0] == 200
    server.wait_idle()
    assert server.routed()["remote"] > server.routed()["local"] > 0
    assert server.metric("baton_request_retries_total") == 0
    status, answer = server.request("POST", "/roles", {"worker": "decode-0", "roles": ["prefill"]})
    assert (status, "last worker" in answer["error"]["message"]) == (409, True)


def test_the_command_shows_and_changes(server) -> None:
    def roles(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("baton")), "roles", *arguments, "--url", server.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert roles().stdout.splitlines()[:2] == ["decode-0   decode", "prefill-0  prefill"]
    assert roles("prefill-0", "prefill+decode").stdout.splitlines()[1] == "prefill-0  prefill+decode"
    assert roles("prefill-0", "prefill").stdout.splitlines()[1] == "prefill-0  prefill"
    refused = roles("decode-9", "prefill")
    assert (refused.returncode, "there are: decode-0, prefill-0" in refused.stderr) == (1, True)


def test_when_decode_dies_a_prefill_worker_with_the_decode_role_goes_on(server, serving, prompts, alone) -> None:
    set_roles(server, "prefill-0", "prefill+decode")
    with Load(server, prompts, alone) as load:
        load.pass_some(serving)
        old = server.children()["decode-0"]
        os.kill(old, signal.SIGKILL)
        load.pass_some(serving, 24)

    def is_back() -> bool:
        here = {worker["id"]: worker["pid"] for worker in server.request("GET", "/workers")[1]["workers"]}
        return here.get("decode-0", old) != old

    serving.wait_until(is_back, "decode-0 is restarted and has joined", 40)
    assert server.request("GET", "/ready")[0] == 200
    assert server.request("GET", "/roles")[1]["workers"] == {"decode-0": ["decode"], "prefill-0": ["prefill", "decode"]}
    set_roles(server, "prefill-0", "prefill")
    server.wait_idle()
