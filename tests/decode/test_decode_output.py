"""When a generation ends."""

from baton.core.request import FinishReason, SamplingParams
from baton.decode.output import finish_reason, suppressed_tokens

SAMPLING = SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=(7, 8))


def test_a_stop_token_ends_it_even_as_the_first_one() -> None:
    assert finish_reason(7, 1, SAMPLING) is FinishReason.STOP


def test_a_stop_token_as_the_last_one_allowed_is_a_stop() -> None:
    assert finish_reason(8, 3, SAMPLING) is FinishReason.STOP


def test_the_limit_ends_it() -> None:
    assert finish_reason(1, 3, SAMPLING) is FinishReason.LENGTH
    assert finish_reason(1, 2, SAMPLING) is None


def test_stop_tokens_may_not_come_before_min_tokens() -> None:
    assert suppressed_tokens(0, SAMPLING) == (7, 8)
    assert suppressed_tokens(1, SAMPLING) == (7, 8)
    assert suppressed_tokens(2, SAMPLING) == ()
