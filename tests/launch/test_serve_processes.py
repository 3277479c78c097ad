"""What the launcher does with real processes. What requests see when processes die is in tests/e2e/test_deaths.py."""

import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SMALL = ("--device", "cpu", "--dtype", "float32", "--kv-memory", "16M")


@pytest.fixture
def serve(server_process, tiny_model):
    """Start `baton serve` on the tiny model; ended at the end of the test, however that ends."""
    started = []

    def start(*arguments: str):
        server = server_process.ServerProcess("serve", str(tiny_model), *SMALL, *arguments)
        started.append(server)
        return server

    yield start
    for server in started:
        server.__exit__()


def _all_gone(builders, server) -> bool:
    return not any(builders.is_running(pid) for pid in server.pids.values())


def test_start_answer_and_stop(serve, builders):
    server = serve()
    at_start = [line for line in server.lines if not line.startswith("still starting")]  # a busy machine
    assert len(at_start) <= 14, server.output  # two of them tell what each worker measured of its steps
    assert sorted(server.pids) == ["decode-0", "gateway", "prefill-0"]
    for pid in (server.process.pid, server.pids["gateway"]):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    status, answer = server.complete("the capital of France")
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 8
    status, ledger = server.get("/ledger")
    assert (status, ledger["idle"]) == (200, True)

    started = time.monotonic()
    server.interrupt()
    assert server.wait(30) == 0
    assert time.monotonic() - started <= 5.0
    assert _all_gone(builders, server)
    assert not server.run_dir.exists()


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_killed_worker_is_missed_at_once(serve, builders, victim):
    server = serve()
    assert server.get("/ready")[0] == 200
    os.kill(server.pids[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    builders.wait_until(lambda: server.get("/ready")[0] == 503)
    assert time.monotonic() - killed_at < 1.0


def test_nothing_outlives_a_killed_launcher(serve, builders):
    server = serve()
    server.process.kill()
    builders.wait_until(lambda: _all_gone(builders, server))
    assert server.run_dir.exists()  # nobody was left to remove it
    second = serve("--prefill", "0")
    assert not server.run_dir.exists()
    assert sorted(second.pids) == ["decode-0", "gateway"]
    assert second.complete("after a crash")[0] == 200


def test_ctrl_c_while_a_worker_starts_leaves_no_traceback(serve, server_process, tiny_model):
    server = serve("--prefill", "0")
    join = ("--join", server.join_address, "--key-file", str(server.key_file))
    with server_process.BatonProcess("decode", str(tiny_model), *SMALL, *join) as worker:
        worker.wait_for_line("joins tcp://")
        worker.interrupt()
        assert worker.wait(30) != 0
        assert "Traceback" not in worker.output, worker.output


def test_a_worker_with_another_model_is_refused(serve, server_process, tiny_model):
    server = serve("--prefill", "0")
    join = ("--join", server.join_address, "--key-file", str(server.key_file))
    other_dtype = ("--device", "cpu", "--dtype", "float16", "--kv-memory", "16M")
    with server_process.BatonProcess("decode", str(tiny_model), *other_dtype, *join) as worker:
        assert worker.wait(60) == 2, worker.output
        assert "refused" in worker.output
        assert "Traceback" not in worker.output
    server.wait_ready(prefill=0, decode=1)


def test_each_role_by_itself(server_process, tiny_model, tmp_path: Path):
    key_file = tmp_path / "cluster.key"
    gateway_flags = ("--dtype", "float32", "--key-file", str(key_file))
    with server_process.ServerProcess("gateway", str(tiny_model), *gateway_flags) as gateway:
        assert key_file.stat().st_mode & 0o777 == 0o600
        assert gateway.get("/ready")[0] == 503
        join = ("--join", gateway.join_address, "--key-file", str(key_file))
        with (
            server_process.BatonProcess("prefill", str(tiny_model), *SMALL, *join) as prefill,
            server_process.BatonProcess("decode", str(tiny_model), *SMALL, *join) as decode,
        ):
            gateway.wait_ready(prefill=1, decode=1)
            status, answer = gateway.complete("over TCP, with keys")
            assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
            for worker in (prefill, decode):
                worker.interrupt()
                assert worker.wait(30) == 0, worker.output
        gateway.interrupt()
        assert gateway.wait(30) == 0
