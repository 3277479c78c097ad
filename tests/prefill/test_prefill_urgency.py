"""PrefillScheduler under policies: who waits, who is paused, who moves all the same."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import SchedulerConfig
from baton.core.queueing import FAIR, FCFS, PRIORITY, SHORTEST, QueuePolicy, Waiting
from baton.prefill.scheduler import PrefillScheduler


def make(policy: QueuePolicy, budget: int = 64, max_running: int = 4) -> PrefillScheduler:
    return PrefillScheduler(SchedulerConfig(budget, budget, max_running, 10**6, policy=policy))


class Worker:
    """Prompts that need no blocks, one step a second. What was computed of whom, and when each was complete."""

    def __init__(self, scheduler: PrefillScheduler):
        self.scheduler = scheduler
        self.now = 0
        self.lengths: dict[str, int] = {}
        self.computed: Counter[str] = Counter()
        self.done_at: dict[str, int] = {}

    def add(self, name: str, num_tokens: int, **urgency: object) -> None:
        self.lengths[name] = num_tokens
        self.scheduler.add(Waiting(name, float(self.now), num_tokens, **urgency))

    def step(self) -> dict[str, int]:
        while (name := self.scheduler.next_waiting(float(self.now))) is not None:
            self.scheduler.admit(name, self.lengths[name])
        plan = self.scheduler.plan()
        self.scheduler.launched(plan)
        self.now += 1
        for chunk in plan:
            self.computed[chunk.request_id] += chunk.num_tokens
            if chunk.is_last:
                self.done_at[chunk.request_id] = self.now
        return {chunk.request_id: chunk.num_tokens for chunk in plan}

    def run(self) -> None:
        while self.scheduler.num_running or self.scheduler.num_waiting:
            assert self.step(), "a scheduler with work always plans some"


def test_an_urgent_short_prompt_passes_a_long_one_that_is_under_way() -> None:
    """SC04: one giant prompt must not stall everybody (sgl-project/sglang #32549)."""
    worker = Worker(make(PRIORITY))
    worker.add("giant", 6400, priority=3)
    for _ in range(5):
        worker.step()
    worker.add("urgent", 40, priority=0)
    assert worker.step() == {"giant": 24, "urgent": 40}
    assert worker.done_at["urgent"] == 6
    worker.run()
    assert worker.done_at["giant"] == 101


def test_those_that_are_paused_take_no_place_from_the_more_urgent() -> None:
    worker = Worker(make(PRIORITY, max_running=2))
    for name in "abc":
        worker.add(name, 640, priority=3)
    worker.step()
    assert worker.scheduler.num_running == 2
    worker.add("urgent", 64, priority=0)
    worker.add("as low", 64, priority=3)
    assert worker.step()["urgent"] == 56
    assert worker.scheduler.num_running == 3


def test_the_lowest_class_moves_under_a_load_of_the_highest_that_never_ends() -> None:
    """Waiting, by ageing: 4 classes of 10 s. Admitted, by its share: 80 tokens are 10 steps of 8."""
    worker = Worker(make(PRIORITY, max_running=8))
    worker.add("admitted", 144, priority=4)
    worker.step()
    worker.add("waiting", 80, priority=4)
    for i in range(100):
        worker.add(f"a{i}", 32, priority=0)
        worker.add(f"b{i}", 32, priority=0)
        assert sum(worker.step().values()) == 64
    assert worker.done_at["admitted"] <= 12
    assert worker.done_at["waiting"] <= 60


def test_batch_delays_nobody_and_moves_when_it_is_alone() -> None:
    def interactive(with_batch: bool) -> dict[str, int]:
        worker = Worker(make(FCFS))
        if with_batch:
            worker.add("batch", 500, is_batch=True)
        worker.step()
        for i in range(20):
            worker.add(f"r{i}", 30 + 7 * i)
            worker.step()
        worker.run()
        assert not with_batch or worker.computed["batch"] == 500
        return {name: at for name, at in worker.done_at.items() if name != "batch"}

    assert interactive(with_batch=True) == interactive(with_batch=False)
    worker = Worker(make(FCFS))
    worker.add("batch", 500, is_batch=True)
    worker.run()
    assert worker.done_at == {"batch": 8}


def test_two_keys_are_served_alike_however_much_more_one_of_them_asks_for() -> None:
    worker = Worker(make(FAIR))
    for i in range(600):
        worker.add(f"heavy {i}", 40, key="heavy")
        if i % 10 == 0:
            worker.add(f"light {i}", 40, key="light")
    for _ in range(70):  # 4,480 tokens: both are backlogged all the while
        worker.step()
    served = Counter(
        {key: sum(n for r, n in worker.computed.items() if r.startswith(key)) for key in ("heavy", "light")}
    )
    assert sum(served.values()) == 4480
    assert abs(served["heavy"] - served["light"]) <= 2 * 40 * 4


def test_any_policy_but_first_come_first_served_packs_by_length() -> None:
    def first_step(policy: QueuePolicy) -> dict[str, int]:
        worker = Worker(make(policy, budget=8))
        worker.add("long", 10)
        worker.step()  # admitted
        worker.add("longer", 12)
        worker.add("short", 2)
        return worker.step()

    assert first_step(FCFS) == {"long": 2, "longer": 6}
    assert first_step(PRIORITY) == first_step(SHORTEST) == {"long": 2, "longer": 4, "short": 2}


def test_a_newcomer_is_admitted_beside_one_that_uses_the_whole_budget() -> None:
    """SC05: those who wait are promoted though a hog takes every step (vllm-project/vllm #53130)."""
    worker = Worker(make(SHORTEST))
    worker.add("hog", 6410)
    worker.step()
    worker.add("deferred", 3)
    assert worker.step() == {"hog": 61, "deferred": 3}


def test_who_is_computed_is_not_waited_for_when_it_is_paused() -> None:
    scheduler = make(PRIORITY)
    for name, priority in (("low", 3), ("high", 0)):
        scheduler.add(Waiting(name, 0.0, 100, priority=priority))
    assert scheduler.next_waiting(0.0) == "high"
    scheduler.admit("high", 100)
    assert not scheduler.yields("high", "low")
    scheduler.admit("low", 100)
    scheduler.add(Waiting("next", 0.0, 100, priority=0))
    assert scheduler.yields("low", "next")
    assert not scheduler.yields("high", "next")
    assert not scheduler.yields("gone", "next")


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 4), st.sampled_from("xyz"), st.booleans()),
    max_size=12,
)


@settings(deadline=None)
@given(ARRIVALS, st.sampled_from([FCFS, PRIORITY, FAIR, SHORTEST]), st.integers(1, 24), st.integers(1, 3))
def test_everything_is_computed_once_and_the_next_is_whom_a_naive_model_takes(
    arrivals: list[tuple[int, int, int, str, bool]], policy: QueuePolicy, budget: int, max_running: int
) -> None:
    """The naive model looks at all that wait each time. Ties are broken by arrival; fairness is tested elsewhere."""
    worker = Worker(make(policy, budget, max_running))
    waiting: list[Waiting] = []
    for number, (gap, length, priority, key, is_batch) in enumerate(arrivals):
        for _ in range(gap):
            _admit_as_naive(worker, waiting, policy)
            worker.step()
        name = f"r{number}"
        worker.add(name, length, priority=priority, key=key, is_batch=is_batch)
        waiting.append(Waiting(name, float(worker.now), length, key, priority, is_batch))
    while worker.scheduler.num_running or worker.scheduler.num_waiting:
        _admit_as_naive(worker, waiting, policy)
        assert worker.step()
    assert worker.computed == worker.lengths
    assert worker.scheduler.num_waiting_tokens == 0


def _admit_as_naive(worker: Worker, waiting: list[Waiting], policy: QueuePolicy) -> None:
    """Admit as the scheduler says, which must be whom the naive model takes: under a fair policy one of its class."""

    def level(entry: Waiting) -> int:
        if not policy.by_priority or entry.is_batch:
            return 0
        return max(entry.priority - int((worker.now - entry.arrived_at) / policy.ageing_s), 0)

    while (name := worker.scheduler.next_waiting(float(worker.now))) is not None:
        order = sorted(waiting, key=lambda e: (e.is_batch, level(e), e.arrived_at))
        entry = next(e for e in waiting if e.request_id == name)
        if policy.is_fair:
            assert (entry.is_batch, level(entry)) == (order[0].is_batch, level(order[0]))
        else:
            assert entry == order[0]
        worker.scheduler.admit(name, worker.lengths[name])
        waiting.remove(entry)
