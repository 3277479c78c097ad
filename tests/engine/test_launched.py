"""What can be asked of a step under way, with events that pass when the test says so."""

import torch

from baton.engine.launched import ArrivingTokens, KnownTokens, LayerProgress, record_event


class Event:
    def __init__(self) -> None:
        self.has_passed = False
        self.num_waits = 0

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.num_waits += 1
        self.has_passed = True


def test_layers_done_are_those_before_the_first_event_that_has_not_passed() -> None:
    events = [Event(), Event(), Event()]
    progress = LayerProgress(list(zip((4, 8, 10), events, strict=True)))
    assert (progress.layers_done(), progress.is_done()) == (0, False)
    events[0].has_passed = True
    assert (progress.layers_done(), progress.is_done()) == (4, False)
    events[1].has_passed = True
    assert progress.layers_done() == 8
    progress.wait()
    assert [event.num_waits for event in events] == [0, 0, 1]
    assert (progress.layers_done(), progress.is_done()) == (10, True)


def test_tokens_arrive_when_their_event_has_passed() -> None:
    event = Event()
    tokens = ArrivingTokens(torch.tensor([3, -1, 0]), event)
    assert not tokens.is_done()
    assert tokens.token_ids() == [3, None, 0]
    assert event.num_waits == 1
    assert tokens.is_done()


def test_on_the_cpu_everything_is_over_at_once() -> None:
    assert record_event(torch.device("cpu")).query()
    tokens = KnownTokens([5, None])
    assert tokens.is_done()
    assert tokens.token_ids() == [5, None]
