"""The command: exit status, table, files, parsing by the CLI library, and Ctrl-C."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from baton.bench.command import bench_command
from baton.bench.options import LoadOptions, WorkloadOptions

SMALL = WorkloadOptions(num_requests=4, input_len=5, output_len=3)


def test_success(server_in_thread: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, records = tmp_path / "out.json", tmp_path / "out.jsonl"
    status = bench_command(
        server_in_thread.url,
        workload_options=SMALL,
        goodput=("ttft:60000", "tpot:60000"),
        json=figures,
        records=records,
    )
    assert status == 0
    table = capsys.readouterr().out
    for row in (
        "Successful requests:                     4",
        "Failed requests:                         0",
        "Maximum request concurrency:             8",
        "Total input tokens:                      20",
        "  of these cached:                       4",
        "Total generated tokens:                  12",
    ):
        assert row in table.splitlines()
    for name in ("Mean TTFT", "Median TPOT", "P90 ITL", "P95 E2EL", "P99 ITL", "Request goodput"):
        assert name in table

    document = json.loads(figures.read_text())
    assert document["metrics"]["completed"] == 4
    assert document["metrics"]["request_goodput"] == document["metrics"]["request_throughput"]
    assert document["seed"] == 0
    assert document["concurrency"] == 8
    assert document["server"] == {"model": "fake", "max_model_len": 4096, "vocab_size": 1000}
    assert document["config"]["workload"]["input_len"] == 5
    assert document["environment"]["cores"] >= 1
    assert isinstance(document["command_line"], list)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 4
    assert all(len(line["chunk_times_s"]) == 3 and line["error"] is None for line in lines)


def test_a_failed_request_makes_the_status_non_zero(
    server_in_thread: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def second_fails(body: dict) -> AsyncIterator[bytes]:
        if len(server_in_thread.bodies) == 2:
            yield server_in_thread.event({"error": {"message": "boom"}})
            return
        yield server_in_thread.token("x", "length") + server_in_thread.usage(5, 1) + server_in_thread.DONE

    server_in_thread.script = second_fails
    status = bench_command(
        server_in_thread.url,
        workload_options=WorkloadOptions(num_requests=3, input_len=5, output_len=1),
        load_options=LoadOptions(concurrency=1),
        json=tmp_path / "out.json",
    )
    assert status == 1
    out = capsys.readouterr().out
    assert "Failed requests:                         1" in out
    assert "failed (1): error event: boom" in out
    assert json.loads((tmp_path / "out.json").read_text())["failures"] == {"error event: boom": 1}


def test_no_request_succeeded(server_in_thread: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server_in_thread.status = 503
    assert bench_command(server_in_thread.url, workload_options=SMALL) == 1
    out = capsys.readouterr().out
    assert "Mean TTFT (ms):                          -" in out
    assert "failed (4): HTTP 503: too busy" in out


def test_no_server(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_command(f"http://127.0.0.1:{unused_port}") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: no server answers at http://127.0.0.1:{unused_port}")
    assert "baton serve" in captured.err


def test_an_unwritable_result_is_told_before_the_load(
    server_in_thread: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench_command(server_in_thread.url, workload_options=SMALL, json=tmp_path / "absent" / "out.json")
    assert status == 2
    assert "cannot be written" in capsys.readouterr().err
    assert server_in_thread.bodies == []


def test_the_command_line(server_in_thread: Any, capsys: pytest.CaptureFixture[str]) -> None:
    app = App(name="baton", result_action="return_value")
    app.command(bench_command, name="bench")
    words = f"bench {server_in_thread.url}/v1 --workload shared-prefix --prefix-len 7 --num-prefixes 2 --input-len 3"
    words += " --output-len 2 --num-requests 5 --rate 500 --seed 3 --endpoint completions --warmup 1 --timeout 30"
    assert app(f"{words} --vocab-size 500 --model fake --goodput ttft:500 tpot:50 e2el:5000".split()) == 0
    assert len(server_in_thread.bodies) == 6
    assert {len(body["prompt"]) for body in server_in_thread.bodies[1:]} == {10}
    assert max(max(body["prompt"]) for body in server_in_thread.bodies) < 500
    assert "Request rate configured (req/s):         500.00" in capsys.readouterr().out


def test_ctrl_c_prints_what_was_measured(server_in_thread: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = server_in_thread

    async def third_interrupts(body: dict) -> AsyncIterator[bytes]:
        if len(server.bodies) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()  # until the client leaves
        yield server.token("x", "length") + server.usage(5, 1) + server.DONE

    server.script = third_interrupts
    assert threading.current_thread() is threading.main_thread(), "signals are handled there"
    before = signal.getsignal(signal.SIGINT)
    status = bench_command(
        server.url,
        workload_options=WorkloadOptions(num_requests=9, input_len=5, output_len=1),
        load_options=LoadOptions(concurrency=1),
    )
    assert status == 130
    out = capsys.readouterr().out
    assert "Successful requests:                     2" in out
    assert "Unfinished requests (interrupted):       7" in out
    assert signal.getsignal(signal.SIGINT) is before
