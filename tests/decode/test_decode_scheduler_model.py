"""The scheduler, which looks only at what may have changed, against one that looks at everything before each step."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import SchedulerConfig
from baton.core.lifecycle import Event, Phase
from baton.core.queueing import FCFS, PRIORITY, QueuePolicy, Waiting
from baton.core.sequence import Sequence
from baton.decode.scheduler import DecodeScheduler

BLOCK_SIZE = 4
MAX_RUNNING = 6


class World:
    """A pool that is only counted, and requests in every phase. `step` compares the plan with the naive one, `admit`
    and `preempt` whom they were given with whom sorting everybody gives. A step takes a second.
    """

    def __init__(self, num_blocks: int, overlaps: bool, policy: QueuePolicy = FCFS):
        config = SchedulerConfig(token_budget=16, chunk_size=8, max_running=MAX_RUNNING, policy=policy)
        self.scheduler = DecodeScheduler(config)
        self.policy = policy
        self.now = 0.0
        self.entries: dict[str, Waiting] = {}
        self.numbers = itertools.count()  # of pushes and of joining
        self.waiting: dict[str, tuple[bool, int]] = {}  # name |-> whether it has not run before, order
        self.running: dict[str, tuple[bool, int, int]] = {}  # name |-> batch, class when it joined, order
        self.makes_way = False  # batch is being preempted for an interactive request
        self.block_ids = itertools.count()
        self.free = num_blocks
        self.overlaps = overlaps
        self.limits: dict[str, int] = {}
        self.in_flight: list[tuple[list[tuple[Sequence, int]], list[Sequence]]] = []
        self.live: dict[str, Sequence] = {}

    def level(self, name: str) -> int:
        entry = self.entries[name]
        if entry.is_batch or not self.policy.by_priority:
            return 0
        return max(entry.priority - int((self.now - entry.arrived_at) / self.policy.ageing_s), 0)

    def next(self) -> str | None:
        """The naive queue: returning ones first in their class, the last of them first of all."""

        def order(name: str) -> tuple[bool, int, bool, int]:
            is_new, number = self.waiting[name]
            return self.entries[name].is_batch, self.level(name), is_new, number if is_new else -number

        return min(self.waiting, key=order, default=None)

    def add(self, num_prompt: int, max_tokens: int, priority: int, is_batch: bool) -> None:
        name = f"r{len(self.limits)}"
        self.limits[name] = max_tokens
        self.live[name] = Sequence(name, "n", [1] * num_prompt, num_prompt)
        self.entries[name] = Waiting(name, self.now, num_prompt, "", priority, is_batch)
        self.waiting[name] = True, next(self.numbers)
        self.scheduler.add(self.live[name], self.entries[name])

    def has_all(self, sequence: Sequence) -> bool:
        return sequence.num_output_tokens >= self.limits[sequence.request_id]

    def missing(self, sequence: Sequence) -> int:
        needed = 0 if self.has_all(sequence) else -(-sequence.num_tokens // BLOCK_SIZE)
        return max(0, needed - len(sequence.block_table))

    def grow(self, sequence: Sequence) -> bool:
        missing = self.missing(sequence)
        if self.has_all(sequence) or missing > self.free:
            return False
        self.extend(sequence, missing)
        return True

    def room(self, sequence: Sequence) -> int:
        if not self.grow(sequence):
            return 0
        left = self.limits[sequence.request_id] - sequence.num_output_tokens
        return min(left, len(sequence.block_table) * BLOCK_SIZE - sequence.num_tokens + 1)

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        self.free -= num_blocks
        sequence.block_table.extend(next(self.block_ids) for _ in range(num_blocks))

    def release(self, sequence: Sequence) -> None:
        self.free += len(sequence.block_table)
        del sequence.block_table[:]

    def lacking(self, sequence: Sequence) -> int:
        return max(0, -(-(sequence.num_tokens + 1) // BLOCK_SIZE) - self.free)

    def admit(self, remote: bool) -> None:
        sequence = self.scheduler.next_waiting(self.now)
        name = self.next() if len(self.running) < MAX_RUNNING else None
        assert sequence is (self.live[name] if name else None)
        if sequence is None or self.lacking(sequence):
            return
        self.scheduler.admit(sequence)
        self.running[name] = self.entries[name].is_batch, self.level(name), next(self.numbers)
        del self.waiting[name]
        self.extend(sequence, -(-(sequence.num_tokens + 1) // BLOCK_SIZE))
        sequence.on(Event.GRANTED if remote else Event.ADMITTED)

    def hand_over(self) -> None:
        """The oldest hand-over is complete, its first token is sampled."""
        for sequence in self.live.values():
            if sequence.phase is Phase.RECEIVING:
                sequence.on(Event.KV_COMMITTED)
                sequence.num_computed_tokens = sequence.num_tokens
                sequence.expect()
                self.in_flight.append(([], [sequence]))
                if not self.overlaps:
                    self.collect(0)
                return

    def end(self, sequence: Sequence) -> None:
        del self.live[sequence.request_id]
        self.waiting.pop(sequence.request_id, None)
        self.running.pop(sequence.request_id, None)
        self.scheduler.remove(sequence)
        self.release(sequence)
        sequence.on(Event.ENDED)

    def collect(self, num_left: int) -> None:
        while len(self.in_flight) > num_left:
            chunks, sampled = self.in_flight.pop(0)
            for sequence, count in chunks:
                sequence.collected(count)
                if sequence.phase is Phase.COMPUTING and sequence in sampled:
                    sequence.on(Event.PROMPT_COMPUTED)
            for sequence in sampled:
                if sequence.phase is not Phase.FINISHED:
                    sequence.append(1)
                    if sequence.num_known_output_tokens >= self.limits[sequence.request_id]:
                        self.end(sequence)

    def preempt(self, sequence: Sequence) -> None:
        name = sequence.request_id
        able = [n for n in self.running if self.live[n].phase is not Phase.RECEIVING]
        assert name == max(able, key=self.running.__getitem__), "the least urgent, and of those the last to join"
        if self.makes_way:
            assert self.entries[name].is_batch
            assert not all(self.entries[n].is_batch for n in self.waiting), "for an interactive request"
        del self.running[name]
        self.waiting[name] = False, next(self.numbers)
        self.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.on(Event.PREEMPTED)

    def make_way(self) -> None:
        """After it the interactive request that is next has what it lacks, or batch requests could not give it."""
        if not self.scheduler.is_behind_batch(self.now, self.lacking):
            return
        self.collect(0)
        self.makes_way = True
        self.scheduler.make_way(self.now, self.lacking, self.preempt)
        self.makes_way = False
        assert not self.scheduler.is_behind_batch(self.now, self.lacking)

    def step(self) -> None:
        running = list(self.scheduler._running.values())
        decoding = [s for s in running if s.phase is Phase.RUNNING or s.num_pending_tokens]
        assert self.scheduler.num_missing_blocks(self.missing) == sum(map(self.missing, decoding))
        if sum(map(self.missing, decoding)) > self.free:
            self.collect(0)
            self.scheduler.make_room(self.missing, lambda: self.free, self.preempt)
        self.make_way()
        running = list(self.scheduler._running.values())
        decoding = [s for s in running if s.phase is Phase.RUNNING or s.num_pending_tokens]
        # a decode decodes when its request may have another token and there is a block for it, or need be none
        free, expected = self.free, []
        for sequence in decoding:
            if not self.has_all(sequence) and self.missing(sequence) <= free:
                free -= self.missing(sequence)
                expected.append(sequence)
        scarce = sum(map(self.missing, decoding)) > self.free
        plan = self.scheduler.plan(self.room)
        for sequence, count in plan.decodes:
            assert count == 1
            assert sequence.num_tokens <= len(sequence.block_table) * BLOCK_SIZE
            assert not self.has_all(sequence)
        if not scarce:  # else who gets the last block may differ
            assert [s for s, _ in plan.decodes] == expected
        computing = [s for s in running if s.phase is Phase.COMPUTING and not s.num_pending_tokens]
        assert {s.request_id for s, _ in plan.prompts} <= {s.request_id for s in computing}
        if len({self.running[s.request_id][:2] for s in computing}) == 1:  # tests/worker/test_urgency.py has the others
            assert [s for s, _ in plan.prompts] == computing[: len(plan.prompts)]
        self.now += 1.0
        sampled = []
        for sequence, count in plan.chunks:
            sequence.launched(count)
            if sequence.num_uncomputed_tokens == 0:
                sampled.append(sequence)
        for sequence in sampled:
            sequence.expect()
        if plan.chunks:
            self.in_flight.append((plan.chunks, sampled))
        self.collect(1 if plan.chunks and self.overlaps else 0)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.tuples(st.integers(1, 25), st.integers(0, 4), st.booleans())),
    st.tuples(st.just("admit"), st.booleans(), st.none()),
    st.tuples(st.just("hand_over"), st.none(), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 5), st.none()),
    st.tuples(st.just("steps"), st.integers(1, 9), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 40), st.booleans(), st.sampled_from([FCFS, PRIORITY]), st.lists(ACTIONS, max_size=60))
def test_it_plans_what_looking_at_everything_would_plan(
    num_blocks: int, overlaps: bool, policy: QueuePolicy, actions: list
) -> None:
    world = World(num_blocks, overlaps, policy)
    for name, first, second in actions:
        match name:
            case "add":
                world.add(first, *second)
            case "admit":
                world.admit(first)
            case "hand_over":
                world.hand_over()
            case "abort" if first < len(world.live):
                world.end(list(world.live.values())[first])
            case "steps":
                for _ in range(first):
                    world.step()
    assert world.free + sum(len(s.block_table) for s in world.live.values()) == num_blocks
