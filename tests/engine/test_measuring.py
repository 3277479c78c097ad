"""Measuring ops: the arithmetic by literals, the cases of the CPU path at tiny sizes, the table."""

from collections.abc import Callable, Sequence

import pytest
import torch

from baton.engine.measuring.bench import SHAPES, KernelBench
from baton.engine.measuring.case import Case, Run
from baton.engine.measuring.cpu_cases import cpu_cases
from baton.engine.measuring.limits import DeviceLimits, measure_limits
from baton.engine.measuring.measure import HEADER, Measurement, copies_for, doubt_text, limits_text, measure, table_line
from baton.engine.measuring.timing import MIN_ROUNDS, HostTimer, Timing, time_runs
from baton.kernels.gpu.cost import OpCost
from baton.kernels.gpu.model_shapes import ModelShape

TINY = ModelShape("tiny", 16, 32, 2, 3, 1, 8, 101, qk_norm=False)
LIMITS = DeviceLimits(bytes_per_second=1e9, flops_per_second={"float32": 1e12, "float16": 1e12})


def case(num_bytes: int = 0, flops: int = 0, make: Callable[[], Run] | None = None, goal: float = 0.0) -> Case:
    return Case("op", "1 row", OpCost(num_bytes, flops), make or (lambda: lambda: None), "float32", goal)


class ScriptedTimer:
    """Rounds take what the script says."""

    cold_bytes = 0

    def __init__(self, *seconds: float):
        self._seconds = list(seconds)
        self.num_prepared = 0

    def prepare(self, runs: Sequence[Run]) -> Callable[[], float]:
        self.num_prepared += len(runs)
        for run in runs:
            run()
        return lambda: self._seconds.pop(0)


def test_the_fraction_is_floor_over_median_time():
    timing = Timing(median=0.004, least=0.003, most=0.005, num_rounds=5)
    memory_bound = Measurement(case(2_000_000, 1_000_000), LIMITS, timing)
    assert memory_bound.floor == pytest.approx(0.002)
    assert (memory_bound.fraction, memory_bound.bound) == (pytest.approx(0.5), "memory")
    compute_bound = Measurement(case(1000, 1_000_000_000), LIMITS, timing)
    assert compute_bound.floor == pytest.approx(0.001)
    assert (compute_bound.fraction, compute_bound.bound) == (pytest.approx(0.25), "compute")
    assert timing.spread == pytest.approx(0.5)


def test_a_goal_is_a_fraction_or_a_rate():
    assert Measurement(case(goal=0.9), LIMITS, None).goal == 0.9
    by_rate = Case("op", "", OpCost(0, 1), lambda: lambda: None, "float32", goal_flops=0.3e12)
    assert Measurement(by_rate, LIMITS, None).goal == pytest.approx(0.3)


def test_time_runs_takes_the_median_of_at_least_five_rounds():
    timing = time_runs(ScriptedTimer(3.0, 1.0, 2.0, 9.0, 4.0), [lambda: None], budget_s=0.0)
    assert timing == Timing(median=3.0, least=1.0, most=9.0, num_rounds=MIN_ROUNDS)


def test_operands_are_repeated_until_no_cache_holds_them():
    assert copies_for(num_bytes=1 << 20, cold_bytes=8 << 20) == 8
    assert copies_for(num_bytes=100 << 20, cold_bytes=8 << 20) == 1
    assert copies_for(num_bytes=10, cold_bytes=8 << 20) == 128, "tiny operands lie in a cache in a model, too"
    assert copies_for(num_bytes=0, cold_bytes=0) == 1


def test_a_run_gets_operands_of_its_own_and_all_of_them_run():
    made, timer = [], ScriptedTimer(*[1.0] * 5)
    timer.cold_bytes = 3000

    def make() -> Run:
        number = len(made)
        made.append(0)

        def run() -> None:
            made[number] += 1

        return run

    [result] = measure([case(1000, make=make)], timer, LIMITS, 0.0)
    assert result.timing is not None
    assert made == [1, 1, 1]


def test_a_case_that_fails_says_why_and_the_next_goes_on():
    def fail() -> Run:
        raise RuntimeError("no memory\nmany details")

    results = list(measure([case(make=fail), case(1000)], ScriptedTimer(*[1.0] * 5), LIMITS, 0.0))
    assert [result.problem for result in results] == ["RuntimeError: no memory", ""]
    assert results[0].fraction is None
    assert "no memory" in table_line(results[0])
    assert results[0].as_json()["problem"] == "RuntimeError: no memory"


def test_host_rounds_take_runs_in_turn():
    calls = [0, 0]

    def run(index: int) -> Run:
        def count() -> None:
            calls[index] += 1

        return count

    measured = HostTimer(round_s=0.0).prepare([run(0), run(1)])
    before = list(calls)
    for _ in range(4):
        assert measured() > 0
    assert [after - start for after, start in zip(calls, before, strict=True)] == [2, 2]


@pytest.fixture(scope="module")
def tiny_results() -> list[Measurement]:
    return list(measure(cpu_cases(TINY), HostTimer(cold_bytes=0, round_s=0.0), LIMITS, 0.0))


def test_every_op_of_the_cpu_path_runs(tiny_results):
    assert [result.problem for result in tiny_results if result.problem] == []
    ops = {result.case.op.split(",")[0].split(" ")[0] for result in tiny_results}
    assert ops == {"linear", "decode", "prefill", "rms", "add", "silu", "rope", "gather", "scatter", "sampler"}
    assert {result.case.op for result in tiny_results if result.case.op.startswith("linear")} == {
        f"linear {name}, {dtype}" for name in ("qkv", "o", "gate_up", "down", "lm_head") for dtype in ("fp16", "fp32")
    }


def test_costs_of_the_cpu_path_by_hand(tiny_results):
    costs = {(result.case.op, result.case.size): result.case.cost for result in tiny_results}
    # o: 24 x 16 weights of 2 bytes; 8 rows of 24 in and 16 out of 4 bytes
    assert costs["linear o, fp16", "8 rows"] == OpCost(24 * 16 * 2 + 8 * 40 * 4, 2 * 8 * 24 * 16)
    # 256 tokens of one key and one value of 8, the query and the output of 3 heads
    assert costs["decode attention", "1 x 256"] == OpCost(4 * 8 * (2 * 256 + 2 * 3), 4 * 256 * 3 * 8)
    # token i of the chunk sees 768 + i
    visible = sum(768 + i for i in range(1, 257))
    assert costs["prefill attention", "256 on 768"].flops == 4 * visible * 3 * 8
    # 2 layers, keys and values of 8 numbers, read and written
    assert costs["gather", "256 tokens"] == OpCost(2 * 256 * 2 * 2 * 8 * 4, 0)


def test_the_table_is_aligned_and_fits_120_columns(tiny_results):
    lines = [table_line(result) for result in tiny_results]
    assert max(map(len, [HEADER, *lines])) <= 120
    assert {line.find("memory") for line in lines} - {-1} == {HEADER.find("bound")}
    widest = Case(
        "prefill attention, torch",
        "8,192 on 32,768",
        OpCost(999 * 10**9, 999 * 10**12),
        lambda: lambda: None,
        "float32",
        0.9,
    )
    line = table_line(Measurement(widest, LIMITS, Timing(999.9, 1.0, 9e4, 5)))
    assert len(line) <= 120


def test_impossible_and_uneven_rows_are_marked_and_explained():
    def measured(median: float, least: float, most: float) -> Measurement:
        return Measurement(case(1_000_000, goal=0.9), LIMITS, Timing(median, least, most, 5))  # floor 1 ms

    good, edge = measured(0.002, 0.0018, 0.0022), measured(0.001 / 1.05, 0.0009, 0.001)
    impossible, uneven = measured(0.0009, 0.0009, 0.0009), measured(0.002, 0.001, 0.0021)
    assert [row.is_doubtful for row in (good, edge, impossible, uneven)] == [False, False, True, True]
    assert [row.as_json()["is_doubtful"] for row in (good, impossible)] == [False, True]
    assert table_line(good).endswith("90%")
    assert table_line(impossible).endswith("90% ?")
    assert doubt_text([good, edge]) == []
    text = " ".join(doubt_text([good, impossible, uneven]))
    assert "2 rows above 105% of the limit or spread by more than 50%" in text
    assert "Run again" in text
    assert not Measurement(case(), LIMITS, None, "no memory").is_doubtful


def test_limits_are_measured_and_said():
    limits = measure_limits(HostTimer(round_s=0.001), torch.device("cpu"), ("float32",), scale=16)
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e8 < limits.flops_per_second["float32"] < 1e14
    text = limits_text(DeviceLimits(4.3e12, {"bfloat16": 7.9e14}))
    assert text == "measured limits: 4,300.0 GB/s, 790 TFLOP/s bfloat16"


def test_the_bench_keeps_what_it_prints(monkeypatch):
    monkeypatch.setitem(SHAPES, "smollm2-135m", TINY)
    monkeypatch.setattr("baton.engine.measuring.bench._BUDGET_S", 0.0)
    monkeypatch.setattr("baton.engine.measuring.bench.timer_for", lambda _: HostTimer(0, 0.0))
    limits = iter([LIMITS, DeviceLimits(2e9, {"float32": 1e11, "float16": 2e12})])
    monkeypatch.setattr("baton.engine.measuring.bench.measure_limits", lambda *_: next(limits))
    bench, told = KernelBench("cpu", "SmolLM2-135M", 1, "a processor"), []
    lines = bench.run(told.append)
    assert lines[0].startswith("tiny on a processor, 1 thread")
    assert lines[1] == "measured limits: 2.0 GB/s, 1 TFLOP/s float32, 2 TFLOP/s float16", "the better ones"
    content = bench.as_json()
    rows = content["measurements"]
    table = lines[lines.index(HEADER) + 1 :]
    doubts = len(doubt_text(bench._results))
    assert len(rows) == len(table) - doubts == len(told) - 3
    assert told[1:3] == ["linear qkv, fp16, 1 row", "linear qkv, fp16, 8 rows"]
    assert content["limits"]["bytes_per_second"] == 2e9
    assert rows[0]["fraction"] == pytest.approx(rows[0]["bytes"] / 2e9 / rows[0]["timing"]["median"])
    assert bench.num_failed == 0
