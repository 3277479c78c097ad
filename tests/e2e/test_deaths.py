"""Processes die. Nothing hangs, nothing leaks, no client is left without an answer, and the tokens stay the same."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ["--dtype", "float32", "--token-budget", "32", "--kv-memory", "8M"]


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 320) for _ in range(num_tokens)]


def kill(server, name: str) -> int:
    pid = server.children()[name]
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_back(server, serving, name: str, old_pid: int) -> None:
    """The launcher started it again and a probe went through it."""
    serving.wait_until(lambda: server.children().get(name, old_pid) != old_pid, f"{name} is restarted")
    serving.wait_until(lambda: server.request("GET", "/ready")[0] == 200, "the server is ready again", 40)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_killed_worker_costs_no_token(name, serve, serving, tiny_model) -> None:
    prompts = [prompt(i, 40 + 20 * i) for i in range(8)]
    with serve(tiny_model, *FLAGS, "--prefill", "2", "--decode", "2", "--local-prefill", "never") as server:
        alone = [server.token_ids(one, 200) for one in prompts]
        server.require_handed_over()
        server.flush()
        generated = server.metric("baton_generation_tokens_total")
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(server.token_ids, one, 200) for one in prompts]
            serving.wait_until(
                lambda: server.metric("baton_generation_tokens_total") > generated + 40, "some tokens are out"
            )
            old = kill(server, name)
            assert [future.result() for future in running] == alone
        wait_back(server, serving, name, old)
        assert server.token_ids(prompts[0], 20) == alone[0][:20]


def test_a_killed_only_decode_worker_ends_its_streams_with_an_answer(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        with server.stream(prompt(1, 30), 900, ignore_eos=True) as events:
            first = next(events)
            assert "error" not in json.loads(first)
            old = kill(server, "decode-0")
            last = list(events)[-1]
        # Either it went on, exactly, on the restarted worker, or the client was told.
        assert last == "[DONE]" or json.loads(last)["error"]["message"]
        wait_back(server, serving, "decode-0", old)
        assert len(server.token_ids(prompt(1, 30), 10)) == 10


def test_a_killed_gateway_comes_back_and_finds_its_workers(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        alone = server.token_ids(prompt(2, 50), 30)
        old = kill(server, "gateway")

        def answers() -> bool:
            try:
                return server.request("GET", "/ready", timeout_s=5)[0] == 200
            except OSError:
                return False

        serving.wait_until(lambda: server.children().get("gateway", old) != old, "the gateway is restarted")
        serving.wait_until(answers, "the new gateway is ready", 40)
        assert server.token_ids(prompt(2, 50), 30) == alone


def test_a_killed_launcher_leaves_no_process(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        pids = list(server.children().values())
        assert len(pids) == 3
        os.kill(server.process.pid, signal.SIGKILL)
        serving.wait_until(lambda: not any(map(serving.is_alive, pids)), "all children of the killed launcher ended")
        server.was_stopped = True


def test_interrupting_twice_stops_at_once(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        pids = list(server.children().values())
        with server.stream(prompt(3, 20), 900, ignore_eos=True) as events:
            next(events)
            server.process.send_signal(signal.SIGINT)
            serving.wait_until(lambda: "again" in server.log, "the launcher says that it drains")
            server.process.send_signal(signal.SIGINT)
            server.process.wait(10)
        serving.wait_until(lambda: not any(map(serving.is_alive, pids)), "no process is left")
        server.was_stopped = True


def test_interrupting_once_lets_a_running_stream_finish(serve, serving, tiny_model) -> None:
    with serve(tiny_model, *FLAGS) as server:
        with server.stream(prompt(4, 20), 300, ignore_eos=True) as events:
            next(events)
            server.process.send_signal(signal.SIGINT)
            assert list(events)[-1] == "[DONE]"
        assert server.process.wait(30) == 0
        server.was_stopped = True


def test_workers_join_and_leave_while_requests_run(serve, serving, tiny_model) -> None:
    """A decode worker comes and goes by the printed join line; every request is answered, with the same tokens."""
    prompts = [prompt(500 + i, 20 + 7 * (i % 9)) for i in range(120)]
    with serve(tiny_model, *FLAGS) as server:
        alone = {i: server.token_ids(prompts[i], 12) for i in range(0, 120, 10)}
        join = next(line for line in server.log.splitlines() if "--join" in line)
        command = [*join[join.index("baton decode") :].split(), *FLAGS]
        command[0] = str(Path(sys.executable).with_name("baton"))
        stop = threading.Event()

        def come_and_go() -> int:
            rounds = 0
            while not stop.is_set() and rounds < 3:
                joined = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                try:
                    serving.wait_until(lambda: len(server.ledger()["workers"]) == 3, "the third worker is in", 60)
                finally:
                    joined.send_signal(signal.SIGINT if rounds % 2 else signal.SIGKILL)
                    output = joined.communicate(timeout=30)[0]
                assert joined.returncode in (0, -signal.SIGKILL), output
                serving.wait_until(lambda: len(server.ledger()["workers"]) == 2, "it left", 30)
                rounds += 1
            return rounds

        with ThreadPoolExecutor(9) as pool:
            churn = pool.submit(come_and_go)
            while not churn.done():
                outputs = list(pool.map(lambda one: server.token_ids(one, 12), prompts))
                assert {i: outputs[i] for i in alone} == alone
            stop.set()
            assert churn.result() == 3
