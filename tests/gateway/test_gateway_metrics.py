"""/metrics: true counts, a bounded number of series, and no request that fails because it was counted."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.core.messages import Role, Status, Tuned
from baton.core.step_cost import StepCost, StepTotals
from baton.core.tuner_event import TunerEvent

BODY = {"prompt": "hi", "max_tokens": 500}


async def samples(world: Any) -> dict[str, float]:
    """name{label="value",...} |-> value."""
    async with world.http.get(world.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_counts_of_one_answer(in_world: Any, world_module: Any, answer: list[int], tokenizer: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair(cached_tokens=1)
        await world_module.until(lambda: world.gateway.probe.ready)
        await world.answer_to("/v1/completions", BODY)
        await world.answer_to("/v1/completions", BODY | {"prompt": ""})
        found = await samples(world)
        num_prompt = len(tokenizer.encode("hi"))
        assert found["baton_prompt_tokens_total"] == num_prompt
        assert found["baton_prefix_cache_queries_total"] == num_prompt
        assert found["baton_prefix_cache_hits_total"] == 1
        assert found["baton_generation_tokens_total"] == len(answer) + 1  # and the probe's
        assert found['baton_request_finished_total{finished_reason="stop"}'] == 1
        assert found['baton_http_responses_total{status_class="2xx"}'] == 1
        assert found['baton_http_responses_total{status_class="4xx"}'] == 1
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert found[f"baton_{name}_count"] == 1
        assert found['baton_request_queue_time_seconds_count{class="interactive"}'] == 1
        assert found["baton_handover_copy_seconds_sum"] == pytest.approx(0.001)
        assert found["baton_handover_message_seconds_sum"] == pytest.approx(0.0005)
        stages = sum(value for name, value in found.items() if name.startswith("baton_stage_seconds_sum"))
        assert stages == pytest.approx(found["baton_time_to_first_token_seconds_sum"])
        assert found['baton_gateway_requests{state="running"}'] == 0

    in_world(scenario)


def test_workers_report(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        steps = StepTotals(num_steps=7, seconds=0.5, num_decodes=14)
        decode.say(Status(3, 2, 700, 10, 20, 30, 40, 0, 50, 1234, 567, 8, 9, 11, 1, steps=steps))
        await world_module.until(lambda: world.gateway.membership.workers[decode.ref].status)
        found = await samples(world)
        labels = 'role="decode",worker="decode-0"'
        assert found[f"baton_worker_requests_waiting{{{labels}}}"] == 3
        assert found[f"baton_worker_requests_running{{{labels}}}"] == 2
        assert found[f"baton_worker_tokens_computed_total{{{labels}}}"] == 1234
        assert found[f"baton_worker_preemptions_total{{{labels}}}"] == 8
        assert found[f"baton_worker_handover_failures_total{{{labels}}}"] == 1
        assert found[f"baton_kv_cache_usage_ratio{{{labels}}}"] == 0.5
        assert found[f"baton_worker_step_seconds_total{{{labels}}}"] == 0.5
        assert found['baton_worker_step_work_total{role="decode",term="base",worker="decode-0"}'] == 7
        assert found['baton_worker_step_work_total{role="decode",term="per_decode",worker="decode-0"}'] == 14
        assert found['baton_worker_blocks{role="decode",state="cached",worker="decode-0"}'] == 40
        decode.say(Tuned([TunerEvent(5.0, "cap", 12, 9, "too slow"), TunerEvent(6.0, "cap", 9, 8, "too slow")]))
        await world_module.until(lambda: world.gateway.membership.workers[decode.ref].num_tuner_events)
        assert (await samples(world))[f"baton_worker_tuner_changes_total{{{labels}}}"] == 2
        decode.leave()
        await world_module.until(lambda: len(world.gateway.membership.workers) == 1)
        assert not any("decode-0" in name for name in await samples(world))

    in_world(scenario)


def test_clients_cannot_make_series(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready)

        async def every_kind(name: str) -> None:
            await world.answer_to("/v1/completions", BODY | {"user": name}, headers={"X-Request-Id": name})
            await world.answer_to("/v1/completions", BODY | {"model": name})
            await world.answer_to("/v1/completions", BODY | {"prompt": ""})
            await world.get(f"/{name}")

        await every_kind("first")
        before = set(await samples(world))
        for number in range(30):
            await every_kind(f"name-{number}")
        assert set(await samples(world)) == before

    in_world(scenario)


def test_a_broken_measurement_costs_nothing(
    in_world: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("Counters can only be incremented by non-negative amounts.")

    monkeypatch.setattr("prometheus_client.Counter.inc", broken)
    monkeypatch.setattr("prometheus_client.Histogram.observe", broken)

    async def scenario(world: Any) -> None:
        await world.pair(cached_tokens=10_000)
        for stream in (False, True):
            async with world.post("/v1/completions", BODY | {"stream": stream}) as response:
                assert response.status == 200
                assert "🏃" in (await response.text())
        assert world.is_empty

    in_world(scenario)
    assert "a measurement was lost" in caplog.text


def test_a_worker_that_does_not_answer_is_not_idle(in_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.gateway.cluster.REPORT_TIMEOUT_S", 0.05)

    async def scenario(world: Any) -> None:
        await world.pair(answers_queries=False)
        world.worker("decode-1", Role.DECODE)
        status, ledger = await world.get("/ledger")
        assert status == 200
        assert ledger["idle"] is False
        assert ledger["workers"]["decode-0"] == {"idle": False, "error": "no answer"}
        assert ledger["workers"]["prefill-0"]["idle"] is True
        async with world.http.post(world.url + "/flush_cache") as response:
            assert response.status == 503
            assert (await response.json())["flushed_blocks"]["decode-0"] is None

    in_world(scenario)


def test_where_prompts_are_computed_and_how_good_predictions_are(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.pair()
        await world_module.until(lambda: world.gateway.probe.ready)
        await world.answer_to("/v1/completions", BODY)
        found = await samples(world)
        assert found['baton_routed_total{way="remote"}'] == 1, "the probe, which names its workers, is not counted"
        assert found["baton_ttft_prediction_ratio_count"] == 0, "nothing is known yet"
        cost = StepCost(0.01, 1e-4, 0.0, 1e-3, 0.0, 100, 0.1, 100, 100)
        status = Status(*[0] * 15, step_cost=cost, settings={"token budget": 512, "prompt budget": 256})
        for worker in (prefill, decode):
            worker.say(status)
        await world_module.until(lambda: world.gateway.membership.workers[decode.ref].status)
        await world_module.until(lambda: world.gateway.backlogs)
        assert world.gateway.backlogs == {prefill.ref: {Role.PREFILL: 0.0}, decode.ref: {Role.DECODE: 0.0}}
        await world.answer_to("/v1/completions", BODY)
        found = await samples(world)
        assert sum(value for name, value in found.items() if name.startswith("baton_routed_total")) == 2
        assert found["baton_ttft_prediction_ratio_count"] == 1
        assert found["baton_ttft_prediction_ratio_sum"] > 0

    in_world(scenario)


def test_the_queue_is_counted_by_class(in_world: Any, world_module: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair(auto=False, max_running=1, cached_tokens=0)
        await world_module.until(lambda: world.gateway.probe.ready)
        batch = BODY | {"service_tier": "flex"}
        requests = []
        for number, body in enumerate((BODY, BODY, batch, batch)):
            requests.append(asyncio.create_task(world.answer_to("/v1/completions", body)))
            await world_module.until(lambda n=number: world.gateway.dispatcher.num_queued == n)
        found = await samples(world)
        assert found['baton_queue_length{class="interactive"}'] == 1
        assert found['baton_queue_length{class="batch"}'] == 2
        status, _ = await world.answer_to("/v1/completions", BODY)
        assert status == 429
        for number in range(4):
            await world_module.until(lambda n=number: decode.live and world.gateway.dispatcher.num_queued == 3 - n)
            decode.finish(decode.request_id)
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
        found = await samples(world)
        assert found['baton_requests_refused_total{reason="queue_full"}'] == 1
        assert found['baton_request_queue_time_seconds_count{class="interactive"}'] == 2
        assert found['baton_request_queue_time_seconds_count{class="batch"}'] == 2
        assert found['baton_queue_length{class="batch"}'] == 0
        num_answer, num_prompt = len(decode.answer), 2
        assert found['baton_tokens_served_total{class="interactive"}'] == 2 * (num_prompt + num_answer)
        assert found['baton_tokens_served_total{class="batch"}'] == 2 * (num_prompt + num_answer)

    in_world(scenario, max_queue=1)
