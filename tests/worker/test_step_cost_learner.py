"""StepCostLearner against known coefficients: fits of measured GPU kernels, and a slow processor's."""

import math
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.step_cost import StepCost, StepShape, chunk_products
from baton.worker.step_cost_learner import StepCostLearner

DEVICES = {
    "8b on H200": StepCost(4.88e-3, 1.8e-5, 8.5e-10, 1.39e-5, 2.98e-8),
    "70b on 4 A100": StepCost(22e-3, 149e-6, 3.6e-9, 116e-6, 5.6e-8),
    "0.6b on H200": StepCost(1.5e-3, 1.73e-6, 3.6e-10, 4e-6, 2.6e-8),
    "processor": StepCost(20e-3, 3e-3, 1e-6, 2.5e-3, 2e-6),
}


def prompt(rng: random.Random) -> StepShape:
    new, start = rng.choice([64, 200, 512, 1000, 2048, 4096]), rng.choice([0, 0, 0, 1024, 4096, 8192])
    return StepShape(new, chunk_products(start, new))


def decode(rng: random.Random) -> StepShape:
    num_decodes = rng.randint(1, 128)
    return StepShape(0, 0.0, num_decodes, num_decodes * rng.randint(200, 3000))


def mixed(rng: random.Random) -> StepShape:
    decodes = decode(rng)
    if rng.random() < 0.7:
        return decodes
    new = rng.choice([16, 64, 256, 512])
    products = chunk_products(rng.randint(0, 2000), new)
    return StepShape(new, products, decodes.num_decodes, decodes.decode_context)


KINDS = {"prefill": prompt, "decode": decode, "mixed": mixed}


def noisy(seconds: float, rng: random.Random) -> float:
    """10 % of noise, and one step in fifty stalls."""
    return seconds * max(rng.gauss(1, 0.1), 0.5) * (20 if rng.random() < 0.02 else 1)


def mean_error(cost: StepCost, truth: StepCost, shape: Callable[[random.Random], StepShape], seed: int = 5) -> float:
    rng = random.Random(seed)
    shapes = [shape(rng) for _ in range(200)]
    return sum(abs(cost.seconds(s) / truth.seconds(s) - 1) for s in shapes) / len(shapes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_it_predicts_within_five_percent_under_noise_and_stalls(device: str, kind: str) -> None:
    truth, shape, rng, learner = DEVICES[device], KINDS[kind], random.Random(1), StepCostLearner()
    for _ in range(400):
        one = shape(rng)
        learner.observe(one, noisy(truth.seconds(one), rng))
    assert mean_error(learner.cost, truth, shape) < 0.05
    assert learner.cost.relative_error < 0.2


def test_coefficients_that_the_steps_determine_are_found() -> None:
    truth, rng, learner = DEVICES["8b on H200"], random.Random(1), StepCostLearner()
    for _ in range(3000):
        one = mixed(rng) if rng.random() < 0.5 else prompt(rng)
        learner.observe(one, noisy(truth.seconds(one), rng))
    cost = learner.cost
    assert cost.base_s == pytest.approx(truth.base_s, rel=0.1)
    assert cost.per_prompt_token_s == pytest.approx(truth.per_prompt_token_s, rel=0.1)
    assert cost.per_product_s == pytest.approx(truth.per_product_s, rel=0.2)
    assert cost.per_decode_s == pytest.approx(truth.per_decode_s, rel=0.2)
    assert cost.per_context_s == pytest.approx(truth.per_context_s, rel=0.1)


def test_steps_of_one_size_are_predicted_although_they_determine_no_coefficient() -> None:
    learner = StepCostLearner()
    for _ in range(500):
        learner.observe(StepShape(0, 0.0, 8, 8000), 0.01)
    assert learner.cost.seconds(StepShape(0, 0.0, 8, 8000)) == pytest.approx(0.01, rel=0.01)


def test_what_no_step_tells_stays_sane() -> None:
    """A decode worker that never saw a prompt still has a plausible price for one."""
    truth, rng, learner = DEVICES["8b on H200"], random.Random(1), StepCostLearner()
    for _ in range(1000):
        one = decode(rng)
        learner.observe(one, noisy(truth.seconds(one), rng))
    assert truth.per_prompt_token_s / 10 < learner.cost.per_prompt_token_s < truth.per_prompt_token_s * 10


def test_what_was_learned_is_kept_when_steps_no_longer_tell() -> None:
    truth, rng, learner = DEVICES["processor"], random.Random(1), StepCostLearner()
    for _ in range(500):
        one = prompt(rng)
        learner.observe(one, truth.seconds(one))
    for _ in range(20_000):
        one = decode(rng)
        learner.observe(one, truth.seconds(one))
    assert mean_error(learner.cost, truth, prompt) < 0.05


@pytest.mark.parametrize("factor", [0.5, 1.3, 2.0])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_machine_that_changes_speed_is_followed_within_a_minute_or_150_steps(kind: str, factor: float) -> None:
    truth, shape, rng, learner = DEVICES["70b on 4 A100"], KINDS[kind], random.Random(2), StepCostLearner()
    for speed, seconds in ((1.0, 150.0), (factor, 60.0)):
        busy, num_steps = 0.0, 0
        while busy < seconds or num_steps < 150:
            one = shape(rng)
            taken = noisy(truth.seconds(one) * speed, rng)
            learner.observe(one, taken)
            busy, num_steps = busy + taken, num_steps + 1
    slow = StepCost(*(factor * c for c in (truth.base_s, truth.per_prompt_token_s, truth.per_product_s)),
                    *(factor * c for c in (truth.per_decode_s, truth.per_context_s)))  # fmt: skip
    assert mean_error(learner.cost, slow, shape) < 0.10


def test_the_first_steps_and_unusual_ones_are_left_out() -> None:
    learner, shape = StepCostLearner(num_warmup=3), StepShape(0, 0.0, 1, 100)
    for _ in range(3):
        learner.observe(shape, 5.0)
    for _ in range(20):
        learner.observe(shape, 0.01)
        learner.observe(shape, 3.0, is_usual=False)
    assert learner.cost.num_samples == 20
    assert learner.cost.seconds(shape) == pytest.approx(0.01, rel=1e-3)


def test_one_stall_moves_the_prediction_by_little() -> None:
    learner, shape = StepCostLearner(0), StepShape(512, 131072.0)
    for _ in range(100):
        learner.observe(shape, 0.1)
    learner.observe(shape, 2.0)
    assert learner.cost.seconds(shape) == pytest.approx(0.1, rel=0.01)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.floats(0, 1e12),
            st.integers(0, 10**4),
            st.integers(0, 10**8),
            st.floats(1e-9, 1e6) | st.sampled_from([0.0, -1.0, math.nan, math.inf]),
        ),
        max_size=60,
    )
)
def test_coefficients_are_never_negative_nor_nan(steps: list[tuple[int, float, int, int, float]]) -> None:
    learner = StepCostLearner(0)
    for tokens, products, decodes, context, seconds in steps:
        learner.observe(StepShape(tokens, products, decodes, context), seconds)
        cost = learner.cost
        numbers = [cost.base_s, cost.per_prompt_token_s, cost.per_product_s, cost.per_decode_s, cost.per_context_s]
        assert all(0.0 <= number < math.inf for number in numbers)
        assert 0.0 <= cost.relative_error < math.inf
        assert cost.seconds(StepShape(1, 1.0, 1, 1)) > 0.0


def test_an_update_is_cheap() -> None:
    truth, rng, learner = DEVICES["8b on H200"], random.Random(1), StepCostLearner()
    steps = [(one, truth.seconds(one)) for one in (mixed(rng) for _ in range(300))]
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for one, seconds in steps:
            learner.observe(one, seconds)
        best = min(best, (time.perf_counter() - start) / len(steps))
    assert best < 100e-6  # 15 us on an idle core; the bound is for a busy one
