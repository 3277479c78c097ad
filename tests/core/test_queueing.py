"""WaitingQueue: each policy by literals, faults that others shipped, and against a model that sorts everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import LocalProtocolError
from baton.core.queueing import AGEING_TOKENS_PER_S, FAIR, FCFS, PRIORITY, QueuePolicy, Waiting, WaitingQueue


def waiting(policy: QueuePolicy, *entries: Waiting) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for entry in entries:
        queue.push(entry)
    return queue


def drained(queue: WaitingQueue, now: float = 0.0) -> str:
    """Names in the order they are popped, each served its prompt's tokens."""
    names = ""
    while (entry := queue.pop(now)) is not None:
        queue.served(entry.key, entry.num_tokens, is_batch=entry.is_batch)
        names += entry.request_id
    return names


# ---- policies ----------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    queue = waiting(FCFS, Waiting("a", 0, priority=5), Waiting("b", 1, num_tokens=3, priority=1), Waiting("c", 2))
    assert (len(queue), "b" in queue, queue.num_tokens) == (3, True, 3)
    assert drained(queue) == "abc"
    assert (len(queue), "b" in queue, queue.num_tokens) == (0, False, 0)


def test_the_highest_priority_is_first_and_order_of_arrival_holds_within_it() -> None:
    entries = [Waiting(n, i, priority=p) for i, (n, p) in enumerate({"a": 2, "b": 0, "c": 2, "d": 1, "e": 0}.items())]
    assert drained(waiting(PRIORITY, *entries)) == "bedac"


def test_waiting_counts_as_a_higher_class_with_time() -> None:
    queue = waiting(QueuePolicy(by_priority=True, ageing_s=10), Waiting("low", 0, priority=2))
    queue.push(Waiting("mid", 9, priority=1))
    assert queue.peek(9).request_id == "mid"  # type: ignore[union-attr]
    assert queue.peek(10).request_id == "low"  # type: ignore[union-attr] # one class with `mid` now, and older
    queue.push(Waiting("high", 15, priority=0))
    assert queue.peek(18).request_id == "high"  # type: ignore[union-attr] # both others count as 1
    assert queue.peek(19).request_id == "mid"  # type: ignore[union-attr] # now as 0, and older than `high`
    assert queue.peek(20).request_id == "low"  # type: ignore[union-attr]


def test_the_lowest_class_moves_under_continuous_high_load() -> None:
    """One high-priority request comes and one is served each second, for ever: the queue never runs dry."""
    queue = WaitingQueue(QueuePolicy(by_priority=True, ageing_s=10))
    for index in range(5):
        queue.push(Waiting(f"high{index}", 0.0))
    queue.push(Waiting("low", 0.0, priority=3))
    for second in range(100):
        queue.push(Waiting(f"later{second}", float(second)))
        if queue.pop(float(second)).request_id == "low":  # type: ignore[union-attr]
            break
    assert second == 30  # 3 classes of 10 s; then it is the oldest


def test_fair_is_one_to_one_when_ten_to_one_is_offered() -> None:
    queue = WaitingQueue(FAIR)
    served = {"greedy": 0, "modest": 0}
    for second in range(200):
        for index in range(10):
            queue.push(Waiting(f"g{second}.{index}", float(second), num_tokens=100, key="greedy"))
        queue.push(Waiting(f"m{second}", float(second), num_tokens=100, key="modest"))
        for _ in range(2):
            entry = queue.pop(float(second))
            assert entry is not None
            queue.served(entry.key, entry.num_tokens + 50)
            served[entry.key] += entry.num_tokens + 50
    assert served == {"greedy": 30_000, "modest": 30_000}


def test_fair_counts_tokens_and_not_requests() -> None:
    long = [Waiting(f"l{i}", i, num_tokens=300, key="long") for i in range(4)]
    short = [Waiting(f"s{i}", i, num_tokens=100, key="short") for i in range(12)]
    queue = waiting(FAIR, *long, *short)
    popped = []
    for _ in range(8):
        entry = queue.pop(0.0)
        assert entry is not None
        queue.served(entry.key, entry.num_tokens)
        popped.append(entry.key)
    assert popped.count("long") == 2
    assert popped.count("short") == 6


def test_an_idle_key_saves_no_credit() -> None:
    queue = WaitingQueue(FAIR)
    for index in range(10):
        queue.push(Waiting(f"b{index}", 0, num_tokens=100, key="busy"))
    for _ in range(5):
        queue.served(queue.pop(0.0).key, 100)  # type: ignore[union-attr]
    for index in range(5):
        queue.push(Waiting(f"i{index}", 1, num_tokens=100, key="idle"))
    popped = []
    for _ in range(6):
        entry = queue.pop(1.0)
        assert entry is not None
        queue.served(entry.key, entry.num_tokens)
        popped.append(entry.key)
    assert popped == ["busy", "idle"] * 3  # not five of `idle` in a row


def test_a_key_that_left_before_all_others_came_is_not_ahead_of_them() -> None:
    queue = waiting(FAIR, Waiting("a", 0, num_tokens=500, key="first"))
    assert queue.pop(0.0) is not None
    queue.served("first", 500)
    queue.push(Waiting("b", 1, num_tokens=10, key="second"))
    queue.push(Waiting("c", 2, num_tokens=10, key="first"))
    assert drained(queue) == "bc"


def test_counters_of_idle_keys_are_forgotten() -> None:
    queue = WaitingQueue(FAIR)
    for index in range(5000):
        queue.push(Waiting("a", 0, num_tokens=1, key=f"key{index}"))
        queue.served(queue.pop(0.0).key, 1)  # type: ignore[union-attr]
        queue.push(Waiting("b", 0, num_tokens=1, key="steady"))
        queue.served(queue.pop(0.0).key, 10)  # type: ignore[union-attr]
    assert len(queue._shares[False]._counters) < 200
    assert len(queue._shares[False]._waiting._heap) < 100


def test_the_shortest_prompt_is_first_and_the_longest_waits_a_bounded_time() -> None:
    policy = QueuePolicy(shortest_first=True)
    entries = [Waiting("a", 0, num_tokens=900), Waiting("b", 0, num_tokens=10), Waiting("c", 0, num_tokens=300)]
    assert drained(waiting(policy, *entries)) == "bca"
    queue = waiting(policy, Waiting("long", 0, num_tokens=5000))
    for second in range(20):
        queue.push(Waiting(f"short{second}", float(second), num_tokens=10))
        if queue.pop(float(second)).request_id == "long":  # type: ignore[union-attr]
            break
    assert second == 5000 / AGEING_TOKENS_PER_S


def test_batch_fills_what_the_others_leave() -> None:
    queue = waiting(FCFS, Waiting("b", 0, is_batch=True), Waiting("i", 1))
    assert queue.num_batch == 1
    assert queue.pop(2.0).request_id == "i"  # type: ignore[union-attr]
    assert queue.pop(2.0, with_batch=False) is None
    assert queue.pop(2.0).request_id == "b"  # type: ignore[union-attr]
    assert queue.num_batch == 0


def test_batch_never_ages_into_the_others() -> None:
    queue = waiting(QueuePolicy(by_priority=True, ageing_s=1), Waiting("b", 0, is_batch=True, priority=1))
    queue.push(Waiting("i", 1000.0, priority=3))
    assert queue.peek(1000.0).request_id == "i"  # type: ignore[union-attr]


def test_who_returns_is_first_of_its_class_and_the_last_to_return_first_of_all() -> None:
    queue = waiting(PRIORITY, Waiting("old", 0, priority=1), Waiting("high", 9))
    queue.push(Waiting("x", 5, priority=1), returning=True)
    queue.push(Waiting("y", 6, priority=1), returning=True)
    assert [entry.request_id for entry in queue.in_order(9.0)] == ["high", "y", "x", "old"]
    assert drained(queue) == "highyxold"


def test_an_id_waits_once() -> None:
    queue = waiting(FCFS, Waiting("a", 0))
    with pytest.raises(LocalProtocolError, match="request a is in the queue already"):
        queue.push(Waiting("a", 1))


# ---- faults that others shipped (numbers are the projects' issues) -------------------------------------------------


def test_sc04_one_giant_prompt_does_not_stall_everybody() -> None:
    """sgl-project/sglang #32549: a giant prompt is passed by short ones, and yet gets its turn."""
    queue = waiting(QueuePolicy(shortest_first=True), Waiting("giant", 0, num_tokens=100_000))
    for index in range(50):
        queue.push(Waiting(f"s{index}", float(index), num_tokens=50))
        assert queue.pop(float(index)).request_id == f"s{index}"  # type: ignore[union-attr]
    queue.push(Waiting("late", 101.0, num_tokens=50))
    assert queue.pop(101.0).request_id == "giant"  # type: ignore[union-attr]


def test_sc05_deferred_ones_are_offered_again_and_again() -> None:
    """vllm-project/vllm #53130: those that could not be taken must stay in line and not count as taken."""
    queue = waiting(FCFS, *(Waiting(name, i) for i, name in enumerate("abc")))
    for _ in range(10):
        assert queue.peek(5.0).request_id == "a"  # type: ignore[union-attr]
    assert drained(queue, 5.0) == "abc"


def test_sc08_the_preempted_one_is_next_and_nobody_passes_it_while_it_does_not_fit() -> None:
    """vllm-project/vllm #25538: the caller waits with the whole of it, and the queue does not offer another."""
    queue = waiting(FCFS, Waiting("new", 1, num_tokens=1))
    queue.push(Waiting("preempted", 0, num_tokens=900), returning=True)
    assert [queue.peek(float(t)).request_id for t in range(3)] == ["preempted"] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("place", ["returning", "batch", "aged", "plain"])
def test_sc09_an_abort_finds_its_request_wherever_it_waits(place: str) -> None:
    """vllm-project/vllm PR#38663: the abort looked in the other queues, and the request hung."""
    queue = waiting(QueuePolicy(by_priority=True, is_fair=True, ageing_s=5), Waiting("other", 0, key="k"))
    queue.push(Waiting("x", 0, key="j", priority=2, is_batch=place == "batch"), returning=place == "returning")
    now = 6.0 if place == "aged" else 0.0
    queue.peek(now)
    assert queue.remove("x") is not None
    assert queue.remove("x") is None
    assert drained(queue, now) == "other"


# ---- against a model -----------------------------------------------------------------------------------------------


class Model:
    """Sorts everything each time. Times are whole seconds."""

    def __init__(self, policy: QueuePolicy):
        self.policy = policy
        self.entries: list[tuple[Waiting, int, bool]] = []  # with the number of its push, and whether it returned
        self.pushes = 0
        self.counters = {False: dict[str, int](), True: dict[str, int]()}
        self.floors = {False: 0, True: 0}

    def keys(self, is_batch: bool) -> set[str]:
        return {e.key for e, _, _ in self.entries if e.is_batch is is_batch}

    def lowest(self, is_batch: bool) -> int:
        counters = self.counters[is_batch]
        return min((counters[k] for k in self.keys(is_batch)), default=self.floors[is_batch])

    def push(self, entry: Waiting, returning: bool) -> None:
        counters = self.counters[entry.is_batch]
        if entry.key not in self.keys(entry.is_batch):
            counters[entry.key] = max(counters.get(entry.key, 0), self.lowest(entry.is_batch))
        self.pushes += 1
        self.entries.append((entry, self.pushes, returning))

    def level(self, entry: Waiting, now: int) -> int:
        if not self.policy.by_priority or entry.is_batch:
            return 0
        return max(entry.priority - max(int((now - entry.arrived_at) // self.policy.ageing_s), 0), 0)

    def rank(self, entry: Waiting) -> float:
        if self.policy.shortest_first:
            return entry.num_tokens + AGEING_TOKENS_PER_S * entry.arrived_at
        return entry.arrived_at

    def candidates(self, now: int, with_batch: bool) -> list[str]:
        """Who may be next: several only where keys are equal."""
        pool = [e for e in self.entries if not e[0].is_batch] or (self.entries if with_batch else [])
        if not pool:
            return []
        top = min(self.level(e, now) for e, _, _ in pool)
        pool = [item for item in pool if self.level(item[0], now) == top]
        if returning := [item for item in pool if item[2]]:
            return [max(returning, key=lambda item: item[1])[0].request_id]
        if self.policy.is_fair:
            counters = self.counters[pool[0][0].is_batch]
            least = min(counters[e.key] for e, _, _ in pool)
            keys = {e.key for e, _, _ in pool if counters[e.key] == least}
        else:
            keys = {None}
        heads = []
        for key in keys:
            of_key = [item for item in pool if key is None or item[0].key == key]
            heads.append(min(of_key, key=lambda item: (self.rank(item[0]), item[1]))[0].request_id)
        return heads

    def remove(self, request_id: str) -> None:
        entry = next((e for e, _, _ in self.entries if e.request_id == request_id), None)
        if entry is not None:
            self.entries = [item for item in self.entries if item[0] is not entry]
            if not self.keys(entry.is_batch):
                self.floors[entry.is_batch] = self.counters[entry.is_batch][entry.key]

    def served(self, key: str, num_tokens: int, is_batch: bool) -> None:
        counters = self.counters[is_batch]
        counters[key] = counters.get(key, self.lowest(is_batch)) + num_tokens


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.integers(0, 40),  # tokens / 100
            st.sampled_from("klm"),
            st.integers(0, 3),
            st.sampled_from([False, False, True]),  # batch
            st.sampled_from([False, False, False, True]),  # returning
        ),
        st.tuples(st.just("pop"), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 60)),
        st.tuples(st.just("served"), st.sampled_from("klmn"), st.integers(0, 500), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 8)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(
    st.builds(
        QueuePolicy,
        by_priority=st.booleans(),
        is_fair=st.booleans(),
        shortest_first=st.booleans(),
        ageing_s=st.just(5.0),
    ),
    ACTIONS,
)
def test_it_does_what_a_model_does_that_sorts_everything(policy: QueuePolicy, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    queue, model, now, names = WaitingQueue(policy), Model(policy), 0, 0
    for action in actions:
        match action:
            case ("push", tokens, key, priority, is_batch, returning):
                entry = Waiting(f"r{names}", float(now), 100 * tokens, key, priority, is_batch)
                queue.push(entry, returning=returning)
                model.push(entry, returning)
                names += 1
            case ("pop", with_batch):
                candidates = model.candidates(now, with_batch)
                entry = queue.pop(float(now), with_batch=with_batch)
                assert entry.request_id in candidates if entry else candidates == []
                if entry:
                    model.remove(entry.request_id)
                    queue.served(entry.key, entry.num_tokens, is_batch=entry.is_batch)
                    model.served(entry.key, entry.num_tokens, entry.is_batch)
            case ("remove", number):
                queue.remove(f"r{number}")
                model.remove(f"r{number}")
            case ("served", key, tokens, is_batch):
                queue.served(key, tokens, is_batch=is_batch)
                model.served(key, tokens, is_batch)
            case ("wait", seconds):
                now += seconds
        assert len(queue) == len(model.entries)
        assert queue.num_tokens == sum(e.num_tokens for e, _, _ in model.entries)
    forecast = [entry.request_id for entry in queue.in_order(float(now))]
    popped = []
    while (entry := queue.pop(float(now))) is not None:
        queue.served(entry.key, entry.num_tokens, is_batch=entry.is_batch)
        popped.append(entry.request_id)
    assert popped == forecast
