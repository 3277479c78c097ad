"""Supervision of real processes (fake children, the real pipe): order of stopping, restarts, nothing left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.errors import BatonError, ConfigurationError
from baton.launch import child_process, restart_policy, supervisor
from baton.launch.supervisor import Supervisor, describe_exit


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record"


async def _never() -> None:
    await asyncio.Event().wait()


def _run(builders, record, behaviours, during, output=None):
    """Run a supervisor while the coroutine function `during(supervisor)` acts on it."""

    async def main() -> None:
        supervised = Supervisor(builders.fake_specs(record, behaviours), (output if output is not None else []).append)
        async with asyncio.timeout(builders.BOUND_S):
            actor = asyncio.create_task(during(supervised))
            try:
                await supervised.run(_never)
            except BaseException:
                actor.cancel()
                raise
            await actor

    asyncio.run(main())
    assert not any(builders.is_running(pid) for pid in builders.started_pids(record))


def test_the_gateway_drains_before_the_workers_are_told(builders, record):
    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 3)
        assert sorted(supervised.pids) == ["gateway", "worker-1", "worker-2"]
        supervised.request_stop()

    _run(builders, record, ["gateway serve", "serve", "serve"], during)
    drained = [line.split()[0] for line in builders.lines(record) if line.endswith("drained")]
    assert drained[0] == "gateway-0"
    assert sorted(drained[1:]) == ["worker-1", "worker-2"]


def test_a_signal_of_the_terminal_reaches_the_supervisor_only_and_drains(builders, record):
    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 2)
        os.kill(os.getpid(), signal.SIGINT)

    _run(builders, record, ["gateway serve", "serve"], during)
    starts = [line.split() for line in builders.lines(record) if " started " in line]
    assert all(session == pid for _, _, pid, session, _ in starts)  # each leads a session of its own
    assert builders.count(record, "drained") == 2


def test_a_worker_gets_its_thread_count_before_it_starts(builders, record):
    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 3)
        supervised.request_stop()

    _run(builders, record, ["gateway serve", "serve", "serve"], during)
    threads = {line.split()[0]: line.split()[4] for line in builders.lines(record) if " started " in line}
    assert threads["worker-1"] == "2"  # fake_specs gives worker i i + 1 threads
    assert threads["worker-2"] == "3"


@pytest.mark.parametrize("victim", ["gateway-0", "worker-1"])
def test_a_killed_child_comes_back(builders, record, victim, monkeypatch):
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.01)
    output: list[str] = []

    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 2)
        os.kill(supervised.pids[victim.removesuffix("-0")], signal.SIGKILL)
        await builders.until(lambda: builders.count(record, f"{victim} started") == 2)
        supervised.request_stop()

    _run(builders, record, ["gateway serve", "serve"], during, output)
    assert any("ended (signal SIGKILL); it starts again in 0.0 s" in line for line in output)
    assert builders.count(record, "drained") == 2  # the first life of the victim did not drain


def test_three_deaths_before_readiness_end_the_server_with_the_last_words(builders, record, monkeypatch):
    monkeypatch.setattr(restart_policy, "FIRST_DELAY_S", 0.01)

    async def during(supervised: Supervisor) -> None:
        await _never()

    with pytest.raises(BatonError, match=r"worker-1 ended 3 times.*exit code 1.*\n +the reason of the crash"):
        _run(builders, record, ["gateway serve", "crash"], during)
    assert builders.count(record, "worker-1 started") == 3


def test_a_configuration_that_cannot_work_is_not_tried_again(builders, record):
    async def during(supervised: Supervisor) -> None:
        await _never()

    with pytest.raises(ConfigurationError, match="worker-1 cannot run: 12:00:00 ERROR nothing fits"):
        _run(builders, record, ["gateway serve", "misconfigured"], during)
    assert builders.count(record, "worker-1 started") == 1


def test_a_child_that_ignores_sigterm_is_killed_after_a_bound(builders, record, monkeypatch):
    monkeypatch.setattr(supervisor, "WORKER_DRAIN_S", 0.2)

    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 2)
        supervised.request_stop()

    _run(builders, record, ["gateway serve", "stubborn"], during)
    assert builders.count(record, "ignored SIGTERM") == 1


def test_a_second_signal_kills_at_once(builders, record):
    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 2)
        supervised.request_stop()
        await builders.until(lambda: builders.count(record, "ignored SIGTERM") == 1)
        supervised.request_stop()

    _run(builders, record, ["gateway stubborn", "stubborn"], during)  # the bounds add up to more than BOUND_S


def test_a_second_signal_reaches_the_gateway_before_it_is_killed(builders, record):
    """It tells its open streams that they are cut."""

    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: builders.count(record, "started") == 2)
        supervised.request_stop()
        await builders.until(lambda: builders.count(record, "was told") == 1)
        supervised.request_stop()

    _run(builders, record, ["gateway patient", "serve"], during)
    assert builders.lines(record)[-3:] == ["gateway-0 was told", "gateway-0 was told", "gateway-0 drained"]


def test_output_without_line_ends_is_copied_with_the_prefix(builders, record):
    output: list[str] = []

    async def during(supervised: Supervisor) -> None:
        await builders.until(lambda: "worker-0 | last line" in output)
        supervised.request_stop()

    _run(builders, record, ["noisy"], during, output)
    copied = [line.removeprefix("worker-0 | ") for line in output if line.startswith("worker-0 | x")]
    assert "".join(copied) == "x" * 200_000


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(builders, record):
    script = Path(__file__).with_name("fake_launcher.py")
    command = [sys.executable, "-P", str(script), str(record), "gateway serve", "stubborn", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "started\n"
        launcher.kill()
        pids = builders.started_pids(record)
        assert len(pids) == 3
        builders.wait_until(lambda: not any(builders.is_running(pid) for pid in pids))


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (-9, "signal SIGKILL"), (-1000, "signal 1000")])
def test_describe_exit(code, words):
    assert describe_exit(code) == words


def test_a_child_that_cannot_be_started_leaks_no_descriptor(builders, record):
    spec = builders.fake_specs(record, ["serve"])[0]
    missing = child_process.ChildSpec(spec.name, spec.config, ("/does/not/exist",))
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(FileNotFoundError):
        asyncio.run(child_process.ChildProcess(missing, print).start())
    assert len(os.listdir("/proc/self/fd")) == before
