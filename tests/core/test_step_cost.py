"""StepCost by literals, and over the wire."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import StepCost, StepShape, StepTotals, chunk_products


def test_each_length_has_its_coefficient() -> None:
    cost = StepCost(1.0, 0.1, 0.01, 0.5, 0.25)
    assert cost.seconds(StepShape(10, 300.0, 4, 8)) == pytest.approx(1.0 + 1.0 + 3.0 + 2.0 + 2.0)
    assert cost.seconds(StepShape()) == 1.0


def test_products_are_the_area_under_causal_attention() -> None:
    assert chunk_products(0, 4) == 8.0
    assert chunk_products(100, 4) == 408.0


@given(start=st.integers(0, 10**6), first=st.integers(0, 10**5), second=st.integers(0, 10**5))
def test_products_add_up_over_the_parts_of_a_chunk(start: int, first: int, second: int) -> None:
    parts = chunk_products(start, first) + chunk_products(start + first, second)
    assert parts == pytest.approx(chunk_products(start, first + second))


def test_it_travels() -> None:
    cost = StepCost(1.0, 0.1, 0.01, 0.5, 0.25, 7, 0.125)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cost), type=StepCost) == cost


def test_what_many_steps_cost_is_what_each_of_them_costs() -> None:
    cost = StepCost(1.0, 0.1, 0.01, 0.5, 0.25)
    shapes = [StepShape(10, 300.0, 4, 8), StepShape(num_decodes=3, decode_context=40), StepShape()]
    totals = StepTotals()
    for shape in shapes:
        totals = totals.plus(shape, 2.0)
    assert totals == StepTotals(2, 4.0, 10, 300.0, 7, 48)  # the empty one only sampled
    assert cost.seconds_of(totals) == pytest.approx(cost.seconds(shapes[0]) + cost.seconds(shapes[1]))
