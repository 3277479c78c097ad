"""How much a division of workers can take: by hand, beside simulated queues, and beside DistServe's figures."""

import csv
import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.step_cost import StepCost
from baton.gateway.capacity import (
    Machine,
    Mix,
    Outlook,
    PromptClass,
    Targets,
    _Line,
    capacity,
    idle_share,
    mean_machine,
)
from baton.gateway.forecast import Speed, Work, rest_of_prompt

DATA = Path(__file__).resolve().parent.parent / "data" / "distserve"
SOLO = StepCost(0.010, 0.0001, 0.0, 0.001, 0.0)  # 10 ms a step, 0.1 ms a prompt token, 1 ms a decode


def outlook(
    prompt: int, answer: float, ttft_s: float, tpot_s: float, *, cost: StepCost = SOLO, pool: int = 10**9
) -> Outlook:
    mix = Mix((PromptClass(1.0, rest_of_prompt(prompt, prompt), prompt),), (answer,))
    return Outlook(mix, Machine(cost, 0.5, 2048, pool), Targets(ttft_s, tpot_s))


def test_decodes_alone_fill_what_the_target_leaves_them() -> None:
    """A step of 20 ms leaves half of the time to decodes. An answer takes 100 x 1 ms: 5 a second on each worker."""
    free = msgspec.structs.replace(SOLO, per_prompt_token_s=0.0)
    assert capacity(0, 1, outlook(10, 100, 100.0, 0.020, cost=free)) == pytest.approx(5.0, rel=0.01)
    assert capacity(0, 3, outlook(10, 100, 100.0, 0.020, cost=free)) == pytest.approx(15.0, rel=0.01)
    assert capacity(1, 2, outlook(10, 100, 100.0, 0.020, cost=free)) == pytest.approx(10.0, rel=0.01)


def test_a_pool_bounds_what_runs() -> None:
    """10 run, of 100 tokens of prompt and 50 of the answer each, in steps of 20 ms: 5 answers a second."""
    free = msgspec.structs.replace(SOLO, per_prompt_token_s=0.0)
    loose = outlook(100, 100, 100.0, 0.200, cost=free, pool=int(10 * 150 / 0.95))
    assert capacity(0, 1, loose) == pytest.approx(5.0, rel=0.01)


def test_where_no_target_can_be_kept_there_is_no_capacity() -> None:
    assert capacity(1, 1, outlook(1000, 10, 0.05, 1.0)) == 0.0
    assert capacity(1, 1, outlook(10, 10, 1.0, 0.009)) == 0.0
    assert idle_share(1, 1, outlook(1000, 10, 0.05, 1.0)) == idle_share(1, 1, outlook(10, 10, 1.0, 0.009)) == 0.0


def test_prompts_that_are_too_long_for_the_target_are_no_share_of_an_idle_fleet() -> None:
    look = outlook(100, 10, 0.1, 0.1)
    classes = tuple(PromptClass(share, Work(tokens), tokens) for share, tokens in ((0.7, 100), (0.3, 1000)))
    mixed = look._replace(mix=Mix(classes, (10.0,)))
    assert (idle_share(0, 2, look), idle_share(0, 2, mixed)) == (1.0, pytest.approx(0.7))
    assert capacity(0, 2, mixed) == 0.0
    assert 0.0 < capacity(0, 2, mixed, 0.63) < capacity(0, 2, look)


def share_that_waits_no_longer(num_servers: int, rate: float, service_s: float, patience_s: float) -> float:
    """By simulation: Poisson arrivals, equal services, whoever is free first."""
    generator = random.Random(1)
    free_at, now, in_time, count = [0.0] * num_servers, 0.0, 0, 100_000
    for _ in range(count):
        now += generator.expovariate(rate)
        first = min(range(num_servers), key=free_at.__getitem__)
        begin = max(now, free_at[first])
        in_time += begin - now <= patience_s
        free_at[first] = begin + service_s
    return in_time / count


@pytest.mark.parametrize("num_servers", [1, 2, 4])
@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize("patience_s", [0.5, 2.0])
def test_waits_are_about_those_of_a_simulated_queue(num_servers: int, load: float, patience_s: float) -> None:
    rate = load * num_servers
    line = _Line(num_servers, rate, mean_s=1.0, mean_square=1.0)
    found = share_that_waits_no_longer(num_servers, rate, 1.0, patience_s)
    assert line.in_time(patience_s) == pytest.approx(found, abs=0.1)


def test_a_full_line_keeps_nobody() -> None:
    assert _Line(2, 2.0, 1.0, 1.0).in_time(100.0) == 0.0


# A100, OPT-13B: one prefill and one decode worker (+), or two that do both (=), by what Baton's schedulers take in the
# simulator; the rows are those of scripts/compare_distserve.py.
BETTER = "=+++==++===="


def test_the_better_division_of_two_is_known_for_all_of_distserve_s_rows() -> None:
    found = msgspec.json.decode((DATA / "opt13b_a100.json").read_bytes())["distserve"]
    (_, prompt, product), (base, context, decode) = found["prefill"], found["decoding_smallbs"]
    cost = StepCost(*(ms / 1000 for ms in (base + 2, prompt, 2 * product, decode, context)))
    with (DATA / "oracle_goodput.csv").open() as file:
        rows = list(dict.fromkeys(tuple(int(v) for v in list(row.values())[1:5]) for row in csv.DictReader(file)))
    looks = [outlook(p, o, ttft / 1000, tpot / 1000, cost=cost, pool=66_144) for p, o, ttft, tpot in rows]
    ratios = [capacity(1, 1, look) / capacity(0, 2, look) for look in looks]
    assert "".join("+" if ratio > 1 else "=" for ratio in ratios) == BETTER
    assert all(ratio < 0.92 for ratio, better in zip(ratios, BETTER, strict=True) if better == "=")


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 4000),
    st.integers(1, 1000),
    st.floats(0.02, 5.0),
    st.floats(0.011, 0.2),
)
def test_more_workers_and_easier_targets_take_no_less(
    num_prefill: int, num_decode: int, prompt: int, answer: int, ttft_s: float, tpot_s: float
) -> None:
    looks = [outlook(prompt, answer, ttft_s * factor, tpot_s * factor) for factor in (1.0, 1.5, 3.0)]
    idle = [idle_share(num_prefill, num_decode, look) for look in looks]
    assert all(less <= more for less, more in pairwise(idle))
    base = capacity(num_prefill, num_decode, looks[0])
    larger = capacity(2 * num_prefill, 2 * num_decode, looks[0])
    assert base <= larger * 1.01


def test_a_decode_worker_takes_a_step_for_each_chunk_that_its_answers_can_spare() -> None:
    """Within 19 of 20 ms 9 are left: 128 tokens at least. 1000 are 8 steps of 10 ms and 100 ms there, else 1 step."""
    assert [idle_share(0, 1, outlook(1000, 4, ttft_s, 0.020)) for ttft_s in (0.175, 0.185)] == [0.0, 1.0]
    assert [idle_share(1, 1, outlook(1000, 4, ttft_s, 0.020)) for ttft_s in (0.105, 0.115)] == [0.0, 1.0]
    # 400 tokens of an answer can spare 0.9 s for one chunk.
    assert [idle_share(0, 1, outlook(1000, 400, ttft_s, 0.020)) for ttft_s in (0.105, 0.115)] == [0.0, 1.0]


def test_one_prompt_may_be_more_than_a_short_answer_can_spare() -> None:
    """10 tokens can spare 50 ms; a prompt takes 100. None comes to 0.9 of them while they take
    0.1 / (1 - 0.1 r) s: e ** -(0.1 r / (1 - 0.1 r)) = 0.9.
    """
    free = msgspec.structs.replace(SOLO, per_decode_s=0.0)
    assert capacity(0, 1, outlook(1000, 10, 100.0, 0.015, cost=free)) == pytest.approx(0.953, rel=0.01)


def test_prompts_go_where_nobody_decodes() -> None:
    """So that of two workers, which decode for 0.1 s a request, more is had than twice what one takes."""
    free = msgspec.structs.replace(SOLO, per_decode_s=0.0)
    one, two = (capacity(0, count, outlook(1000, 10, 100.0, 0.015, cost=free)) for count in (1, 2))
    assert two > 3 * one


def test_who_is_refused_takes_no_time() -> None:
    """3 of 10 prompts take 1 s and can never be in time. If all ran, a request took 0.345 s, and at 2.6 a second, which
    is a load of 0.9, waits would be 0.31 / (2 * 0.345 * 0.1) = 4.5 s: 0.17 of the others would be in time.
    """
    classes = (PromptClass(0.7, Work(500), 500), PromptClass(0.3, Work(10_000), 10_000))
    look = outlook(500, 10, 0.4, 1.0)._replace(mix=Mix(classes, (10.0,)))
    assert capacity(0, 1, look, 0.25) > 2.6


def test_what_decodes_cost_is_what_those_that_decode_know() -> None:
    """The other one has computed nothing but prompts for long: it is off by 20 times there."""
    costs = StepCost(0.014, 4e-5, 1e-9, 9e-5, 6e-7), StepCost(0.016, 6e-5, 3e-9, 3e-5, 3e-8)
    prefill, decode = (Speed(cost, 2048, 2048, 2048, join_steps=1.5) for cost in costs)
    machine = mean_machine([prefill, decode], [decode], 1000)
    assert machine == Machine(StepCost(0.016, pytest.approx(5e-5), pytest.approx(2e-9), 3e-5, 3e-8), 1.5, 2048, 1000)


def test_a_slow_hand_over_makes_prefill_workers_worth_less() -> None:
    look = outlook(1000, 20, 0.25, 0.030)
    slow = look._replace(transfer_s=1e-4)
    assert capacity(1, 1, slow) < capacity(1, 1, look)
    assert capacity(0, 2, slow) == capacity(0, 2, look)


def test_what_is_cached_is_not_computed() -> None:
    look = outlook(2000, 20, 0.3, 0.030)
    cached = look._replace(mix=Mix((PromptClass(1.0, Work(100, 195_000.0), 2000.0),), (20.0,)))
    assert capacity(1, 1, cached) > capacity(1, 1, look)


def test_where_no_prompt_may_be_local_decode_workers_are_no_help_with_prompts() -> None:
    """A prompt of 1000 takes 0.11 s alone: that bounds one prefill worker, which three decode workers could help."""
    free = outlook(1000, 1, 1.0, 1.0)
    alone = capacity(1, 3, free._replace(may_be_local=False))
    assert alone < 1 / 0.11
    assert capacity(1, 3, free) > 2 * alone
    assert capacity(2, 2, free._replace(may_be_local=False)) > 1.9 * alone
    assert capacity(0, 4, free._replace(may_be_local=False)) == capacity(0, 4, free)
