"""Which workers can take one more request: by literals, and a model that simulates what they would hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.core.messages import NodeRef
from baton.gateway.credits import Ask, Credits
from baton.gateway.growth import UNKNOWN_GROWTH

D0, D1 = NodeRef("decode-0", 1), NodeRef("decode-1", 1)


def ask(num_tokens: int, max_tokens: int, *, num_generated: int = 0, is_batch: bool = False) -> Ask:
    return Ask(num_tokens, num_generated, max_tokens, is_batch)


def with_worker(num_blocks: int = 64, max_running: int = 8, block_size: int = 16) -> Credits:
    credits = Credits()
    credits.add_worker(D0, block_size=block_size, num_blocks=num_blocks, max_running=max_running)
    return credits


def test_blocks_cover_prompt_and_expected_growth() -> None:
    credits = with_worker(num_blocks=10)
    assert credits.with_credit(ask(159, 1), 0.0) == [D0]  # 160 tokens, 10 blocks
    assert credits.with_credit(ask(160, 1), 0.0) == []
    assert credits.with_credit(ask(100, 60), 0.0) == [D0]
    assert credits.with_credit(ask(100, 61), 0.0) == []


def test_growth_is_bounded_while_nothing_is_known() -> None:
    credits = with_worker(num_blocks=(UNKNOWN_GROWTH + 16) // 16)
    assert credits.with_credit(ask(16, 100_000), 0.0) == [D0]
    assert credits.with_credit(ask(17, 100_000), 0.0) == []


def test_growing_requests_are_not_admitted_all_at_once() -> None:
    """A pool of 64 blocks of one token; four requests of 10 that grow by 30: one at a time has 40 at its end."""
    credits = with_worker(num_blocks=64, block_size=1)
    credits.take("a", D0, ask(10, 30), 0.0)
    assert credits.with_credit(ask(10, 30), 0.0) == []
    credits.release("a", 0.0)
    assert credits.with_credit(ask(10, 30), 0.0) == [D0]


def test_what_ends_soon_makes_room_for_what_comes() -> None:
    """Blocks of one token. Where the first has n of its 30 tokens still to come, the worst moment is its end: it holds
    40 then, and a newcomer of 10 holds 10 + n.
    """
    credits = with_worker(num_blocks=64, block_size=1)
    credits.take("a", D0, ask(25, 30, num_generated=15), 0.0)
    assert credits.with_credit(ask(10, 30), 0.0) == []  # n = 15: 65
    credits.release("a", 0.0)
    credits.take("a", D0, ask(26, 30, num_generated=16), 0.0)
    assert credits.with_credit(ask(10, 30), 0.0) == [D0]  # n = 14: 64


def test_progress_is_seen_now_and_then() -> None:
    credits = with_worker(num_blocks=64, block_size=1)
    credits.take("a", D0, ask(10, 40), 0.0)
    assert credits.with_credit(ask(10, 30), 0.0) == []
    credits.generated("a", 33)  # n = 7: 50 + 17 is more than 64
    assert credits.with_credit(ask(10, 30), 0.0) == []
    assert credits.with_credit(ask(7, 30), 0.0) == [D0]


def test_lengths_are_learned() -> None:
    credits = with_worker(num_blocks=100, block_size=1)
    assert credits.with_credit(ask(50, 1000), 0.0) == []
    for _ in range(16):
        credits.answered(20, was_cut=False)
    assert credits.with_credit(ask(80, 1000), 0.0) == [D0]
    assert credits.with_credit(ask(81, 1000), 0.0) == []
    assert credits.with_credit(ask(90, 10), 0.0) == [D0]


def test_a_prediction_that_was_wrong_is_made_anew() -> None:
    credits = with_worker(num_blocks=400, block_size=1)
    for _ in range(16):
        credits.answered(20, was_cut=False)
    credits.take("a", D0, ask(10, 1000), 0.0)
    assert credits.with_credit(ask(300, 1), 0.0) == [D0]
    credits.generated("a", 100)  # longer than any: it is expected to get 256 more
    assert credits.with_credit(ask(300, 1), 0.0) == []


def test_max_running() -> None:
    credits = with_worker(max_running=2)
    credits.take("a", D0, ask(1, 1), 0.0)
    credits.take("b", D0, ask(1, 1), 0.0)
    assert credits.with_credit(ask(1, 1), 0.0) == []
    with pytest.raises(LocalProtocolError):
        credits.take("c", D0, ask(1, 1), 0.0)


@pytest.mark.parametrize(("cap", "places"), [(None, 64), (1, 1), (8, 8), (60, 60), (500, 64)])
def test_the_present_cap_counts(cap: int | None, places: int) -> None:
    credits = with_worker(max_running=64, num_blocks=1000)
    credits.set_cap(D0, cap)
    credits.set_cap(D1, 1)  # not known: nothing happens
    for number in range(places):
        credits.take(str(number), D0, ask(1, 1), 0.0)
    assert credits.with_credit(ask(1, 1), 0.0) == []


@pytest.mark.parametrize(("num_released", "ahead"), [(0, 0), (39, 0), (40, 1), (120, 3), (1000, 5)])
def test_who_will_soon_have_a_place_is_sent_ahead(num_released: int, ahead: int) -> None:
    """40 in ten seconds are one in a quarter of a second; a quarter of the cap at most."""
    credits = with_worker(max_running=64, num_blocks=1000)
    credits.set_cap(D0, 20)
    for number in range(num_released):
        credits.take(str(number), D0, ask(1, 1), 10.0)
        credits.release(str(number), 10.0)
    for number in range(20 + ahead):
        credits.take(f"now {number}", D0, ask(1, 1), 20.0)
    assert credits.with_credit(ask(1, 1), 20.0) == []
    credits.release("now 0", 20.1)
    for number in range(ahead):
        credits.release(f"now {number + 1}", 20.1)
    credits.take("later", D0, ask(1, 1), 20.1)  # the old ones are forgotten
    assert credits.with_credit(ask(1, 1), 20.1) == []


def test_each_of_the_others_must_be_able_to_go_on() -> None:
    """Two hold ten blocks of 16 tokens each and grow by less than one. With a newcomer of nine and a block for either
    that makes 31; one of ten would have to wait at the worker.
    """
    credits = with_worker(num_blocks=31)
    for name in "ab":
        credits.take(name, D0, ask(145, 4), 0.0)
    assert credits.with_credit(ask(129, 2), 0.0) == [D0]
    assert credits.with_credit(ask(145, 2), 0.0) == []


def test_batch_takes_what_is_left_and_leaves_an_eighth() -> None:
    credits = with_worker(max_running=8, num_blocks=64)
    for number in range(7):
        credits.take(f"b{number}", D0, ask(1, 1, is_batch=True), 0.0)
    assert credits.with_credit(ask(1, 1, is_batch=True), 0.0) == []
    # Interactive requests have all eight places: the worker preempts batch for them.
    for number in range(8):
        credits.take(f"i{number}", D0, ask(1, 1), 0.0)
    assert credits.with_credit(ask(1, 1), 0.0) == []
    for number in range(8):
        credits.release(f"i{number}", 0.0)
    credits.release("b0", 0.0)
    assert credits.with_credit(ask(1, 1, is_batch=True), 0.0) == [D0]


def test_batch_that_has_ended_makes_way_for_nobody() -> None:
    credits = with_worker(max_running=2)
    for number in range(3):
        credits.take(f"b{number}", D0, ask(1, 1, is_batch=True), 0.0)
        credits.release(f"b{number}", 0.0)
    for number in range(2):
        credits.take(f"i{number}", D0, ask(1, 1), 0.0)
    assert credits.with_credit(ask(1, 1), 0.0) == []


def test_batch_leaves_an_eighth_of_the_blocks_but_one_alone_may_have_all() -> None:
    credits = with_worker(num_blocks=64, block_size=1)
    assert credits.with_credit(ask(63, 1, is_batch=True), 0.0) == [D0]
    credits.take("i", D0, ask(9, 1), 0.0)
    assert credits.with_credit(ask(45, 1, is_batch=True), 0.0) == [D0]  # 10 + 46 = 56 of 64
    assert credits.with_credit(ask(46, 1, is_batch=True), 0.0) == []
    credits.take("b", D0, ask(45, 1, is_batch=True), 0.0)
    assert credits.with_credit(ask(53, 1), 0.0) == [D0]  # as if b were not there
    assert credits.with_credit(ask(54, 1), 0.0) == []


def test_batch_moves_where_there_is_one_place() -> None:
    credits = with_worker(max_running=1)
    assert credits.with_credit(ask(1, 1, is_batch=True), 0.0) == [D0]
    credits.take("b", D0, ask(1, 1, is_batch=True), 0.0)
    assert credits.with_credit(ask(1, 1, is_batch=True), 0.0) == []
    assert credits.with_credit(ask(1, 1), 0.0) == [D0]


def test_credit_is_given_back_exactly_once() -> None:
    credits = with_worker()
    credits.take("a", D0, ask(1, 1), 0.0)
    with pytest.raises(LocalProtocolError):
        credits.take("a", D0, ask(1, 1), 0.0)
    credits.release("a", 0.0)
    with pytest.raises(LocalProtocolError):
        credits.release("a", 0.0)


def test_a_worker_that_left_takes_its_credit_along() -> None:
    credits = with_worker()
    credits.add_worker(D1, block_size=16, num_blocks=4, max_running=1)
    credits.take("a", D1, ask(1, 1), 0.0)
    credits.remove_worker(D1)
    assert credits.with_credit(ask(1, 1), 0.0) == [D0]
    credits.generated("a", 5)
    # Another life of the same name has nothing to do with it.
    credits.add_worker(D1, block_size=16, num_blocks=4, max_running=1)
    credits.release("a", 0.0)
    assert credits.num_in_flight == 0
    assert credits.with_credit(ask(1, 1), 0.0) == [D0, D1]


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "grow", "release"]), st.integers(1, 100), st.integers(1, 100)), max_size=40
)


@given(STEPS)
def test_what_was_promised_fits_whatever_comes(steps: list[tuple[str, int, int]]) -> None:
    """All answers get their max_tokens here, a token a step, which is predicted: the pool is never overcommitted."""
    num_blocks, block_size = 30, 16
    credits = with_worker(num_blocks=num_blocks, max_running=5)
    live: dict[str, list[int]] = {}  # request |-> tokens now, tokens to come
    for number, (kind, num_tokens, max_tokens) in enumerate(steps):
        if kind == "take" and credits.with_credit(ask(num_tokens, max_tokens), 0.0):
            credits.take(str(number), D0, ask(num_tokens, max_tokens), 0.0)
            live[str(number)] = [num_tokens, max_tokens]
        elif kind == "release" and live:
            name = min(live)
            del live[name]
            credits.release(name, 0.0)
        elif kind == "grow":
            for name in list(live):
                live[name] = [live[name][0] + 1, live[name][1] - 1]
                credits.generated(name, 1)
                if live[name][1] == 0:
                    del live[name]
                    credits.release(name, 0.0)
        assert len(live) == credits.num_in_flight <= 5
        worst = max(
            sum(-(-(tokens + t) // block_size) for tokens, left in live.values() if t <= left) for t in range(101)
        )
        assert worst <= num_blocks


# ---- several choices ---------------------------------------------------------------------------------------------


def choices(num_choices: int, num_tokens: int, max_tokens: int) -> Ask:
    return Ask(num_tokens, 0, max_tokens, num_choices=num_choices)


@pytest.mark.parametrize(("num_blocks", "fits"), [(10, True), (9, False)])
def test_full_blocks_of_a_prompt_count_once_and_growth_for_each_choice(num_blocks: int, fits: bool) -> None:
    """Blocks of 4: a prompt of 10 is two full ones, and for each of three choices two tokens and six more. All count as
    if their last block had just been begun: 8 + 3 * (2 + 6) + 3 * 3 = 41 tokens. The other one ends before.
    """
    credits = with_worker(num_blocks=num_blocks, block_size=4)
    credits.take("other", D0, ask(1, 1), 0.0)
    assert credits.with_credit(choices(3, 10, 6), 0.0) == ([D0] if fits else [])


def test_a_request_alone_may_have_more_choices_than_there_is_room_for() -> None:
    credits = with_worker(num_blocks=16, block_size=4, max_running=4)
    assert credits.with_credit(choices(100, 16, 48), 0.0) == [D0]
    assert credits.with_credit(choices(100, 16, 49), 0.0) == [], "not even one"
    credits.take("a", D0, choices(3, 4, 4), 0.0, ["b", "c"])
    assert credits.with_credit(choices(2, 4, 4), 0.0) == [], "five places"
    assert credits.with_credit(choices(1, 4, 4), 0.0) == [D0]


@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_the_prompt_counts_until_the_last_choice_has_ended(order: str) -> None:
    """100 tokens: 50 of the prompt, 10 of each choice, and a newcomer that gets 10 more too."""
    credits = with_worker(num_blocks=100, block_size=1, max_running=8)
    credits.take("a", D0, choices(3, 50, 10), 0.0, ["b", "c"])
    for name, num_tokens in zip(order, (10, 20, 30), strict=True):
        assert credits.with_credit(ask(num_tokens, 10), 0.0) == [D0]
        assert credits.with_credit(ask(num_tokens + 1, 10), 0.0) == []
        credits.release(name, 0.0)
    assert credits.with_credit(ask(90, 10), 0.0) == [D0]
    assert credits.num_in_flight == 0
