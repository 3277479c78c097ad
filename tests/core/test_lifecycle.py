"""The lifecycle table: what it allows, and that everything else raises and changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.core.lifecycle import TRANSITIONS, Event, Phase, advance
from baton.core.sequence import Sequence


def test_the_way_of_a_request_that_is_handed_over() -> None:
    phase = Phase.WAITING
    for event in (Event.GRANTED, Event.KV_COMMITTED, Event.ENDED):
        phase = advance(phase, event)
    assert phase is Phase.FINISHED


def test_the_way_of_a_request_that_is_preempted_and_comes_back() -> None:
    phase = Phase.WAITING
    events = (Event.ADMITTED, Event.PROMPT_COMPUTED, Event.PREEMPTED, Event.ADMITTED, Event.PROMPT_COMPUTED)
    assert [phase := advance(phase, event) for event in events] == [
        Phase.COMPUTING,
        Phase.RUNNING,
        Phase.WAITING,
        Phase.COMPUTING,
        Phase.RUNNING,
    ]


def test_every_phase_but_the_last_can_end() -> None:
    for phase in Phase:
        if phase is not Phase.FINISHED:
            assert advance(phase, Event.ENDED) is Phase.FINISHED


@given(st.sampled_from(Phase), st.sampled_from(Event))
def test_a_pair_that_is_not_in_the_table_raises_and_changes_nothing(phase: Phase, event: Event) -> None:
    sequence = Sequence("r", "n", [1, 2], 2)
    sequence.phase = phase
    if event in TRANSITIONS[phase]:
        sequence.on(event)
        assert sequence.phase is TRANSITIONS[phase][event]
    else:
        with pytest.raises(LocalProtocolError, match=phase):
            sequence.on(event)
        assert sequence.phase is phase
