"""DecodeScheduler under policies: who joins, who makes room for whom, and who is never in the way."""

from baton.core.config import SchedulerConfig
from baton.core.lifecycle import Event
from baton.core.queueing import FAIR, FCFS, PRIORITY, QueuePolicy, Waiting
from baton.core.sequence import Sequence
from baton.decode.scheduler import DecodeScheduler


class Batch:
    """A scheduler over a pool that is only counted. Blocks hold one token: a sequence of n tokens needs n."""

    def __init__(self, policy: QueuePolicy, num_blocks: int = 1000, max_running: int = 8):
        self.scheduler = DecodeScheduler(SchedulerConfig(64, 64, max_running, 10**6, policy=policy))
        self.free = set(range(num_blocks))
        self.now = 0.0
        self.preempted: list[str] = []
        self.sequences: dict[str, Sequence] = {}

    def add(self, name: str, num_tokens: int, **urgency: object) -> Sequence:
        sequence = self.sequences[name] = Sequence(name, "n", [0] * num_tokens, num_tokens)
        self.scheduler.add(sequence, Waiting(name, self.now, num_tokens, **urgency))
        return sequence

    def lacking(self, sequence: Sequence) -> int:
        return max(0, sequence.num_tokens + 1 + self.scheduler.num_running - len(self.free))

    def take(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = num_tokens - len(sequence.block_table)
        if missing > len(self.free):
            return False
        sequence.block_table.extend(self.free.pop() for _ in range(missing))
        return True

    def give(self, sequence: Sequence) -> None:
        self.free |= set(sequence.block_table)
        del sequence.block_table[:]
        sequence.num_computed_tokens = 0

    def join(self, *, computed: bool = True) -> None:
        """All that may; their prompts are computed at once."""
        while (sequence := self.scheduler.next_waiting(self.now)) is not None and not self.lacking(sequence):
            self.take(sequence, sequence.num_tokens + 1)
            self.scheduler.admit(sequence)
            sequence.on(Event.ADMITTED)
            if computed:
                sequence.on(Event.PROMPT_COMPUTED)
                sequence.launched(sequence.num_tokens)
                sequence.collected(sequence.num_tokens)
                sequence.expect()
                sequence.append(0)

    def preempt(self, sequence: Sequence) -> None:
        self.preempted.append(sequence.request_id)
        self.give(sequence)
        sequence.on(Event.PREEMPTED)

    def end(self, name: str) -> None:
        sequence = self.sequences.pop(name)
        self.scheduler.remove(sequence)
        self.give(sequence)
        sequence.on(Event.ENDED)

    def room(self, sequence: Sequence) -> int:
        return int(self.take(sequence, sequence.num_tokens))

    def step(self) -> list[str]:
        """One turn of the role's loop; who got a token."""
        self.join()
        self.scheduler.make_room(
            lambda s: max(0, s.num_tokens - len(s.block_table)), lambda: len(self.free), self.preempt
        )
        self.scheduler.make_way(self.now, self.lacking, self.preempt)
        self.join()
        plan = self.scheduler.plan(self.room)
        for sequence, count in plan.chunks:
            sequence.launched(count)
            sequence.expect()
            sequence.collected(count)
            sequence.append(0)
        self.now += 1.0
        return [sequence.request_id for sequence, _ in plan.chunks]

    @property
    def running(self) -> list[str]:
        return sorted(set(self.sequences) - {s.request_id for s in self.sequences.values() if s.phase == "waiting"})


def test_the_least_urgent_makes_room_and_of_those_the_last_to_join() -> None:
    batch = Batch(PRIORITY)
    for name, priority, is_batch in (
        ("b0", 0, True), ("low0", 3, False), ("b1", 0, True), ("high", 0, False), ("low1", 3, False)
    ):  # fmt: skip
        batch.add(name, 3, priority=priority, is_batch=is_batch)
        batch.join()
    for _ in range(6):
        batch.scheduler.make_room(lambda _: 1, lambda: 0, batch.preempt)
    assert batch.preempted == ["b1", "b0", "low1", "low0"]
    assert batch.running == ["high"]


def test_who_was_preempted_comes_back_before_its_class_and_after_those_above() -> None:
    batch = Batch(PRIORITY)
    for name in ("low0", "low1"):
        batch.add(name, 3, priority=3)
    batch.join()
    batch.add("low2", 3, priority=3)
    batch.scheduler.make_room(lambda _: 1, lambda: int(bool(batch.preempted)) * 9, batch.preempt)
    batch.add("high", 3, priority=1)
    order = []
    while (sequence := batch.scheduler.next_waiting(batch.now)) is not None:
        order.append(sequence.request_id)
        batch.scheduler.remove(sequence)
    assert order == ["high", "low1", "low2"]


def test_batch_makes_way_for_an_interactive_request_without_a_place() -> None:
    batch = Batch(FCFS, max_running=3)
    for name in ("b0", "b1", "b2"):
        batch.add(name, 3, is_batch=True)
    assert batch.step() == ["b0", "b1", "b2"]
    batch.add("interactive", 3)
    assert batch.step() == ["b0", "b1", "interactive"]
    assert batch.preempted == ["b2"]
    assert batch.scheduler.num_preemptions == 1
    for _ in range(5):
        assert batch.step() == ["b0", "b1", "interactive"]
    batch.end("interactive")
    assert batch.step() == ["b0", "b1", "b2"]


def test_batch_makes_way_for_an_interactive_request_without_blocks_and_no_more_than_it_needs() -> None:
    batch = Batch(FCFS, num_blocks=40)
    for name in ("b0", "b1", "b2"):
        batch.add(name, 8, is_batch=True)
        batch.step()
    batch.add("interactive", 12)
    assert batch.step() == ["b0", "b1", "interactive"]
    assert batch.preempted == ["b2"]


def test_batch_is_not_preempted_when_that_would_not_be_enough() -> None:
    batch = Batch(FCFS, num_blocks=40)
    batch.add("other", 24)
    batch.add("b0", 4, is_batch=True)
    batch.join()
    batch.add("interactive", 20)
    for _ in range(3):
        batch.step()
    assert batch.preempted == []


def test_batch_does_not_join_while_an_interactive_request_waits() -> None:
    """Though it would fit, and though it came first: it is not preempted twice for the same one either."""
    batch = Batch(FCFS, num_blocks=40)
    batch.add("other", 20)
    batch.add("b0", 12, is_batch=True)
    batch.join()
    batch.add("large", 20)
    batch.add("b1", 1, is_batch=True)
    for _ in range(3):
        assert "b1" not in batch.step()
    batch.end("other")
    assert any("large" in batch.step() for _ in range(100))
    assert batch.preempted.count("b0") <= 1


def test_a_hand_over_of_a_batch_request_is_not_interrupted() -> None:
    batch = Batch(FCFS, max_running=1)
    sequence = batch.add("b", 3, is_batch=True)
    batch.scheduler.admit(sequence)
    sequence.on(Event.GRANTED)
    batch.add("interactive", 3)
    assert not batch.scheduler.is_behind_batch(0.0, batch.lacking)
    batch.step()
    assert batch.preempted == []


def test_under_the_cap_nobody_is_behind_batch() -> None:
    batch = Batch(FCFS)
    batch.add("b", 3, is_batch=True)
    batch.join()
    asked: list[Sequence] = []
    assert not batch.scheduler.is_behind_batch(0.0, lambda s: asked.append(s) or 0)
    assert asked == [], "nobody waits: nothing is looked up"
    batch.end("b")
    batch.add("large", 2000)
    assert not batch.scheduler.is_behind_batch(0.0, lambda s: asked.append(s) or 0)
    assert asked == [], "no batch runs"


def test_the_lowest_class_moves_under_a_load_of_the_highest_that_never_ends() -> None:
    """After 4 classes of 10 s it counts as one of the highest, and is not the first victim either."""
    batch = Batch(PRIORITY, num_blocks=48, max_running=4)
    low = batch.add("low", 6, priority=4)
    count = 0
    while low.num_output_tokens < 20:
        while batch.scheduler.num_waiting < 4:
            count += 1
            batch.add(f"high {count}", 6, priority=0)
        for name in batch.step():
            if name != "low" and batch.sequences[name].num_output_tokens >= 10:
                batch.end(name)
        assert batch.now < 120
    assert batch.now > 30, "and not before"


def test_prompts_of_a_lower_class_and_of_batch_wait_for_those_above() -> None:
    batch = Batch(PRIORITY)
    low, high = batch.add("low", 200, priority=3), batch.add("high", 60, priority=0)
    last = batch.add("b", 200, is_batch=True)
    batch.join(computed=False)
    assert batch.scheduler.num_running == 3
    assert batch.scheduler.plan(lambda _: 1).prompts == [(high, 60), (low, 4)]
    assert last.num_launched_tokens == 0


def test_two_keys_are_served_alike_in_prompts_and_answers() -> None:
    """10:1 offered. Answers of one key are three times as long: it gets fewer requests and as many tokens."""
    batch = Batch(FAIR, max_running=4)
    lengths = {"heavy": 60, "light": 20}
    tokens = {"heavy": 0, "light": 0}
    for i in range(700):
        batch.add(f"heavy {i}", 10, key="heavy")
        if i % 10 == 0:
            batch.add(f"light {i}", 10, key="light")
    for _ in range(420):
        for name in batch.step():
            key = name.split()[0]
            tokens[key] += 1
            if batch.sequences[name].num_output_tokens >= lengths[key]:
                tokens[key] += 10
                batch.end(name)
    assert abs(tokens["heavy"] / tokens["light"] - 1) < 0.15, tokens


def test_a_prompt_that_is_computed_again_is_not_served_again() -> None:
    batch = Batch(FAIR, max_running=2)
    for name, num_tokens in (("x0", 50), ("y0", 60), ("x1", 15), ("y1", 5), ("x2", 5)):
        batch.add(name, num_tokens, key=name[0])
    batch.join()
    batch.scheduler.make_room(lambda _: 1, lambda: 9 * len(batch.preempted), batch.preempt)
    assert batch.preempted == ["y0"]
    batch.join()
    assert batch.running == ["x0", "y0"]
    batch.end("x0")
    batch.join()
    assert batch.running == ["x1", "y0"], "50 of x, 60 of y"
    batch.end("x1")
    batch.join()
    assert batch.running == ["y0", "y1"], "65 of x, 60 of y and not 120"


def test_an_answer_that_ends_before_it_is_asked_for_room_again_was_served_all_the_same() -> None:
    batch = Batch(FAIR, max_running=1)
    batch.room = lambda sequence: 100  # type: ignore[method-assign]
    batch.add("a1", 10, key="a")
    batch.step()
    batch.add("a2", 10, key="a")
    batch.add("b1", 10, key="b")  # as far as a when it comes
    for _ in range(5):
        assert batch.step() == ["a1"]
    batch.end("a1")
    assert batch.step() == ["b1"]
