"""Figures of records small enough to compute by hand."""

import random

import numpy as np
import pytest

from baton.bench.metrics import compute_metrics, parse_goodput
from baton.bench.record import RequestRecord, failure_counts
from baton.core.errors import ConfigurationError
from baton.core.latency import distribution_ms, percentile


def record(send: float, chunks: list[float], output_tokens: int, **fields: object) -> RequestRecord:
    return RequestRecord(session=0, turn=0, send_s=send, chunk_times_s=chunks, output_tokens=output_tokens, **fields)


# TTFT 100 ms, chunks of 1, 1 and 3 tokens at +100, +200, +500 ms: TPOT (500 - 100) / 4 = 100 ms, ITLs 100 and 300 ms
A = record(1.0, [1.1, 1.2, 1.5], 5, prompt_tokens=10, cached_tokens=4)
# a single token after 300 ms: no TPOT, no ITL
B = record(2.0, [2.3], 1, prompt_tokens=20)
FAILED = record(0.0, [9.0, 9.9], 7, prompt_tokens=1000, error="HTTP 500: x")


def test_one_request() -> None:
    assert A.ttft_s == pytest.approx(0.1)
    assert A.e2el_s == pytest.approx(0.5)
    assert A.tpot_s == pytest.approx(0.1)
    assert A.itls_s == pytest.approx([0.1, 0.3])
    assert B.tpot_s is None
    assert B.itls_s == []


def test_figures_of_three_requests() -> None:
    metrics = compute_metrics([A, B, FAILED], 4.0, {})
    assert (metrics.completed, metrics.failed) == (2, 1)
    assert metrics.total_input_tokens == 30
    assert metrics.total_cached_tokens == 4
    assert metrics.total_output_tokens == 6
    assert metrics.request_throughput == 0.5
    assert metrics.output_throughput == 1.5
    assert metrics.total_token_throughput == 9.0
    assert metrics.request_goodput is None
    assert metrics.max_send_lag_ms is None

    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.mean == pytest.approx(200)
    assert metrics.ttft_ms.median == pytest.approx(200)
    assert metrics.ttft_ms.p90 == pytest.approx(280)
    assert metrics.ttft_ms.p99 == pytest.approx(298)
    assert metrics.tpot_ms is not None
    assert metrics.tpot_ms.mean == pytest.approx(100), "B has no TPOT and must not pull the mean down"
    assert metrics.itl_ms is not None
    assert metrics.itl_ms.mean == pytest.approx(200), "gaps are pooled over requests"
    assert metrics.itl_ms.p95 == pytest.approx(290)
    assert metrics.e2el_ms is not None
    assert metrics.e2el_ms.mean == pytest.approx(400)


def test_itl_is_pooled_not_averaged_per_request() -> None:
    many = record(0.0, [0.1, 0.2, 0.3, 0.4], 4)  # three gaps of 100 ms
    one = record(0.0, [0.1, 0.6], 2)  # one gap of 500 ms
    metrics = compute_metrics([many, one], 1.0, {})
    assert metrics.itl_ms is not None
    assert metrics.itl_ms.mean == pytest.approx(200)


def test_nothing_succeeded() -> None:
    metrics = compute_metrics([FAILED], 2.0, {"ttft": 1.0})
    assert (metrics.completed, metrics.failed, metrics.request_throughput) == (0, 1, 0.0)
    assert metrics.request_goodput == 0.0
    assert metrics.ttft_ms is None
    assert metrics.tpot_ms is None
    assert metrics.itl_ms is None
    assert metrics.e2el_ms is None


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"ttft": 300.1}, 2),
        ({"ttft": 299}, 1),
        ({"tpot": 99}, 1),  # B: a single token has a TPOT of 0
        ({"tpot": 100.1}, 2),
        ({"ttft": 200, "tpot": 99}, 0),  # each fails another limit
        ({"ttft": 200, "e2el": 500.1}, 1),
        ({"e2el": 250}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: dict[str, float], kept: int) -> None:
    assert compute_metrics([A, B, FAILED], 4.0, limits).request_goodput == kept / 4.0


def test_a_limit_that_is_met_exactly_is_kept() -> None:
    exact = record(0.0, [0.5, 1.0], 2)
    assert compute_metrics([exact], 1.0, {"ttft": 500, "tpot": 500, "e2el": 1000}).request_goodput == 1.0


def test_send_lag_is_the_largest_and_counts_failed_requests_too() -> None:
    late = record(2.5, [3.0], 1, scheduled_s=2.0)
    on_time = record(1.0, [1.5], 1, scheduled_s=1.0)
    assert compute_metrics([on_time, late], 4.0, {}).max_send_lag_ms == pytest.approx(500)


@pytest.mark.parametrize(("percent", "value"), [(0, 10), (50, 25), (90, 37), (100, 40), (95, 38.5)])
def test_percentile_interpolates(percent: float, value: float) -> None:
    assert percentile([10, 20, 30, 40], percent) == pytest.approx(value)


def test_percentiles_are_numpys() -> None:
    generator = random.Random(5)
    for count in (1, 2, 3, 10, 101):
        samples = [generator.expovariate(3.0) for _ in range(count)]
        ours = distribution_ms(samples)
        assert ours is not None
        theirs = np.percentile(np.array(samples) * 1000, [50, 90, 95, 99])
        assert [ours.median, ours.p90, ours.p95, ours.p99] == pytest.approx(theirs.tolist())
        assert ours.mean == pytest.approx(float(np.mean(samples)) * 1000)


def test_goodput_limits_are_parsed() -> None:
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize("limit", ["itl:5", "ttft", "ttft:", "ttft:x", "ttft:-1", "tpot:nan", "http://h", "e2el:inf"])
def test_a_bad_goodput_limit_is_named(limit: str) -> None:
    with pytest.raises(ConfigurationError, match="--goodput") as caught:
        parse_goodput(["ttft:500", limit])
    assert limit in str(caught.value)


def test_failures_are_counted_by_text() -> None:
    records = [record(0, [], 0, error=text) for text in ("a", "b", "b", None)]
    assert failure_counts(records) == {"b": 2, "a": 1}
    assert list(failure_counts(records)) == ["b", "a"]
