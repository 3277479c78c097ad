"""DecodeScheduler by literals: who advances, who makes room."""

from baton.core.config import SchedulerConfig
from baton.core.lifecycle import Event
from baton.core.queueing import Waiting
from baton.core.sequence import Sequence
from baton.decode.scheduler import DecodeScheduler


def make(token_budget: int = 8, chunk_size: int = 8, max_running: int = 4) -> DecodeScheduler:
    return DecodeScheduler(SchedulerConfig(token_budget, chunk_size, max_running))


def waiting(scheduler: DecodeScheduler, name: str, num_tokens: int) -> Sequence:
    sequence = Sequence(name, "n", list(range(num_tokens)), num_tokens)
    scheduler.add(sequence, Waiting(name, 0.0, num_tokens))
    return sequence


def computing(scheduler: DecodeScheduler, name: str, num_tokens: int) -> Sequence:
    sequence = waiting(scheduler, name, num_tokens)
    assert scheduler.next_waiting(0.0) is sequence
    scheduler.admit(sequence)
    sequence.on(Event.ADMITTED)
    return sequence


def running(scheduler: DecodeScheduler, name: str, num_tokens: int) -> Sequence:
    sequence = computing(scheduler, name, num_tokens)
    sequence.on(Event.PROMPT_COMPUTED)
    sequence.launched(num_tokens)
    sequence.expect()
    sequence.collected(num_tokens)
    sequence.append(0)
    return sequence


def receiving(scheduler: DecodeScheduler, name: str, num_tokens: int) -> Sequence:
    sequence = waiting(scheduler, name, num_tokens)
    scheduler.admit(sequence)
    sequence.on(Event.GRANTED)
    return sequence


def test_decodes_come_first_and_prompts_share_what_is_left_of_the_budget() -> None:
    scheduler = make(token_budget=8, chunk_size=5)
    prompt = computing(scheduler, "prompt", 20)
    first, second = running(scheduler, "first", 3), running(scheduler, "second", 4)
    other = computing(scheduler, "other", 20)
    assert scheduler.plan(lambda _: True).chunks == [(first, 1), (second, 1), (prompt, 5), (other, 1)]


def test_a_sequence_whose_kv_is_on_the_way_is_not_computed() -> None:
    scheduler = make()
    receiving(scheduler, "r", 5)
    assert scheduler.plan(lambda _: True).chunks == []


def test_a_sequence_without_room_sits_the_step_out() -> None:
    scheduler = make()
    first, second = running(scheduler, "first", 3), running(scheduler, "second", 3)
    assert scheduler.plan(lambda s: s is second).chunks == [(second, 1)]
    assert scheduler.plan(lambda _: True).chunks == [(first, 1), (second, 1)]


def test_however_many_decode_prompts_get_a_share_of_the_budget() -> None:
    scheduler = make(token_budget=8, max_running=99)
    decodes = [running(scheduler, f"d{i}", 2) for i in range(20)]
    prompt = computing(scheduler, "p", 9)
    assert scheduler.plan(lambda _: True).chunks == [*((s, 1) for s in decodes), (prompt, 2)]


def test_the_last_to_join_makes_room_and_goes_to_the_head_of_the_queue() -> None:
    scheduler = make()
    first, second = running(scheduler, "first", 3), running(scheduler, "second", 3)
    late = waiting(scheduler, "late", 3)
    free = [0]

    def preempt(sequence: Sequence) -> None:
        sequence.on(Event.PREEMPTED)
        free[0] += 5

    scheduler.make_room(lambda _: 1, lambda: free[0], preempt)
    assert second.phase == "waiting"
    assert scheduler.num_preemptions == 1
    assert scheduler.next_waiting(0.0) is second
    assert scheduler.plan(lambda _: True).chunks == [(first, 1)]
    scheduler.admit(second)
    assert scheduler.next_waiting(0.0) is late


def test_the_last_one_running_is_never_preempted() -> None:
    scheduler = make()
    only = running(scheduler, "only", 3)
    receiving(scheduler, "r", 3)
    scheduler.make_room(lambda _: 1, lambda: 0, lambda s: s.on(Event.PREEMPTED))
    assert only.phase == "running"
    assert scheduler.num_preemptions == 0


def test_nothing_is_preempted_when_there_is_room() -> None:
    scheduler = make()
    running(scheduler, "a", 3), running(scheduler, "b", 3)
    scheduler.make_room(lambda _: 1, lambda: 2, lambda _: None)
    assert scheduler.num_preemptions == 0


def test_a_request_that_left_is_not_taken_for_one_that_came_with_its_id() -> None:
    scheduler = make()
    first = running(scheduler, "r", 3)
    scheduler.plan(lambda _: 2)
    scheduler.remove(first)
    second = running(scheduler, "r", 3)
    scheduler.plan(lambda _: 1)
    asked = []
    scheduler.plan(lambda s: asked.append(s) or 1)
    assert asked == [second]


def test_the_batch_has_a_bound() -> None:
    scheduler = make(max_running=1)
    running(scheduler, "a", 2)
    waiting(scheduler, "b", 2)
    assert scheduler.next_waiting(0.0) is None


def test_waiting_tokens_count_queued_and_half_computed_prompts_only() -> None:
    scheduler = make()
    running(scheduler, "r", 3)
    receiving(scheduler, "k", 50)
    computing(scheduler, "p", 9).launched(4)
    waiting(scheduler, "w", 7)
    assert scheduler.num_waiting_tokens == 5 + 7


def test_removing_works_in_any_phase() -> None:
    scheduler = make()
    sequences = [running(scheduler, "r", 3), waiting(scheduler, "w", 3)]
    for sequence in sequences:
        scheduler.remove(sequence)
        scheduler.remove(sequence)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
