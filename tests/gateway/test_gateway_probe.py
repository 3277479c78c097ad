"""/ready tells the truth: the result of a probe, not of the question."""

import json
from typing import Any

import pytest

from baton.core.messages import GenerateRequest, Role, Status


def probes(worker: Any) -> list[GenerateRequest]:
    return [m for m in worker.received if isinstance(m, GenerateRequest) and m.request.namespace == "probe"]


def test_ready_after_the_first_probe(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        status, report = await world.get("/ready")
        assert status == 503
        assert report == {
            "ready": False,
            "problem": "no prefill and no decode worker has joined",
            "workers": {"prefill": {"expected": 1, "present": 0}, "decode": {"expected": 1, "present": 0}},
        }
        assert (await world.get("/health"))[0] == 200
        prefill, decode = await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready)
        status, report = await world.get("/ready")
        assert (status, report["ready"], report["problem"]) == (200, True, None)
        (probe,) = probes(decode)
        assert probe.prefill == prefill.ref
        assert probe.request.sampling.max_tokens == 1
        assert world.is_empty

    in_world(scenario)


def test_a_kind_that_is_missing(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready)
        prefill.leave()
        await world_module.until(lambda: len(world.gateway.membership.workers) == 1)
        status, report = await world.get("/ready")
        assert (status, report["problem"]) == (503, "no prefill worker has joined")
        world.worker("prefill-0", Role.PREFILL, incarnation=2)
        await world_module.until(lambda: world.gateway.probe.ready)
        decode.leave()
        await world_module.until(lambda: len(world.gateway.membership.workers) == 1)
        assert (await world.get("/ready"))[0] == 503

    in_world(scenario)


def test_a_get_starts_nothing(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready)
        before = len(probes(decode))
        for _ in range(20):
            assert (await world.get("/ready"))[0] == 200
        assert len(probes(decode)) == before

    in_world(scenario)


def test_a_prefill_worker_that_hands_nothing_over_is_not_ready(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode would hide it: it computes the prompt itself."""
    monkeypatch.setattr("baton.gateway.probe.RETRY_S", 0.01)

    async def scenario(world: Any) -> None:
        world.worker("prefill-0", Role.PREFILL)
        decode = world.worker("decode-0", Role.DECODE, hands_over=False)
        await world_module.until(lambda: "prefill-0 did not hand" in world.gateway.probe.report()["problem"])
        assert (await world.get("/ready"))[0] == 503
        decode.hands_over = True
        await world_module.until(lambda: world.gateway.probe.ready)

    in_world(scenario)


@pytest.mark.parametrize("computes_more_than_the_probe", [True, False])
def test_a_long_prompt_is_busy_and_a_stuck_worker_is_broken(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch, computes_more_than_the_probe: bool
) -> None:
    """Nobody gets a token. What prefill computes for the probes themselves does not excuse decode."""
    monkeypatch.setattr("baton.gateway.probe.TIMEOUT_S", 0.05)
    monkeypatch.setattr("baton.gateway.probe.RETRY_S", 0.01)
    monkeypatch.setattr("baton.gateway.probe.INTERVAL_S", 0.01)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair()
        prefill.say(status_of(0))
        await world_module.until(lambda: world.gateway.probe.ready and len(probes(decode)) > 1)
        decode.finish = lambda request_id: None  # accepts and says nothing
        asked, computed = len(probes(decode)), 0

        def a_step_later() -> bool:
            nonlocal computed
            num_probes = len(probes(decode)) - asked
            computed = computed + 512 if computes_more_than_the_probe else num_probes
            prefill.say(status_of(computed))
            return num_probes > 6

        await world_module.until(a_step_later)
        assert world.gateway.probe.ready == computes_more_than_the_probe
        del decode.finish
        await world_module.until(lambda: world.gateway.probe.ready)

    in_world(scenario)


def status_of(num_tokens_computed: int) -> Status:
    counts = dict.fromkeys(Status.__struct_fields__, 0)
    return Status(**counts | {"num_tokens_computed": num_tokens_computed})


def test_a_probe_that_is_not_answered(in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.probe.TIMEOUT_S", 0.05)
    monkeypatch.setattr("baton.gateway.probe.RETRY_S", 0.01)

    async def scenario(world: Any) -> None:
        world.worker("prefill-0", Role.PREFILL)
        decode = world.worker("decode-0", Role.DECODE)
        decode.finish = lambda request_id: None  # accepts and says nothing
        await world_module.until(lambda: "did not answer" in world.gateway.probe.report()["problem"])
        assert (await world.get("/ready"))[0] == 503
        await world_module.until(lambda: len(probes(decode)) > 1)
        del decode.finish
        await world_module.until(lambda: world.gateway.probe.ready)
        await world_module.until(lambda: world.is_empty)

    in_world(scenario)


def test_idle_servers_are_probed_again_and_busy_ones_are_not(
    in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.gateway.probe.INTERVAL_S", 0.05)

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        await world_module.until(lambda: len(probes(decode)) >= 3)
        world.gateway.dispatcher.last_progress += 1000.0  # as if tokens kept coming
        before = len(probes(decode))
        for _ in range(30):
            await world.get("/health")
        assert len(probes(decode)) <= before + 1

    in_world(scenario)


def test_every_worker_gets_its_turn(in_world: Any, world_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.probe.INTERVAL_S", 0.01)

    async def scenario(world: Any) -> None:
        _, first = await world.pair()
        second = world.worker("decode-1", Role.DECODE)
        await world_module.until(lambda: probes(first) and probes(second))
        first.finish = lambda request_id: first.refuse(request_id, "broken", retryable=False)
        for _ in range(20):
            await world.get("/ready")
        assert world.gateway.probe.ready  # the other one still answers

    in_world(scenario)


def test_probes_are_not_answers_of_clients(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready)
        async with world.http.get(world.url + "/metrics") as response:
            text = await response.text()
        assert "baton_prompt_tokens_total 0.0" in text
        assert json.loads(json.dumps((await world.get("/ledger"))[1]))["idle"] is True

    in_world(scenario)
