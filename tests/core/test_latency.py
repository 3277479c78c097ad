"""Distributions, counted ones against written-out ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.latency import counted_distribution_ms, distribution_ms, time_per_output_token


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=30))
def test_counted_samples_are_those_written_out(counted: list[tuple[int, int]]) -> None:
    seconds = [(value / 1000, count) for value, count in counted]
    written_out = distribution_ms(value for value, count in seconds for _ in range(count))
    found = counted_distribution_ms(seconds)
    if written_out is None:
        assert found is None
        return
    assert found is not None
    for name in written_out.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(written_out, name))


def test_a_single_token_has_no_time_per_output_token() -> None:
    assert time_per_output_token(0.1, 0.1, 1) is None
    assert time_per_output_token(0.1, 0.5, 5) == pytest.approx(0.1)
