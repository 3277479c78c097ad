"""Two links over a network that delays, loses, repeats and reorders: whole prompts or clean failures, never holes."""

import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.core.messages import KVCommit, RingOffer
from baton.core.timeline import Timeline
from baton.transfer.link import HandedOver, ReceiveFailed, SendDone, SendFailed

NUM_TOKENS = 11
HIDDEN = b"hidden"
LEASE_S = 10.0


class Handovers(RuleBasedStateMachine):
    """Prompts of 11 tokens through a ring of two slots of two tokens; D has other block sizes than P.

    `faulty` lets the network lose and repeat; without it every prompt that nobody aborts must arrive.
    """

    fakes: ModuleType
    faulty: bool

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.cluster = self.fakes.Cluster("fake", self.folder)
        self.p: Any = self.cluster.add("prefill-0", 2, 64, lease_s=LEASE_S)
        self.d: Any = self.cluster.add("decode-0", 4, 64, slots=2, slot_tokens=2, lease_s=LEASE_S)
        self.network = self.cluster.network
        self.computed: dict[str, int] = {}  # open on P |-> tokens computed there
        self.sent: dict[str, str] = {}  # over on P |-> how
        self.first_missing: dict[str, int] = {}  # opened on D
        self.received: dict[str, str] = {}  # over on D |-> how
        self.next_id = 0
        self.waiting: dict[str, set[str]] = {"p": set(), "d": set()}
        self.disturbed: set[str] = set()  # aborted by somebody
        self.has_restarted = False
        self.num_losses = 0  # bounded, or nothing would ever arrive

    def kv(self, request_id: str) -> np.ndarray:
        return self.fakes.kv_of(int(request_id), NUM_TOKENS)

    def p_table(self, request_id: str) -> list[int]:
        first = int(request_id) % 8 * 6
        return list(range(first + 5, first - 1, -1))

    def d_table(self, request_id: str) -> list[int]:
        first = int(request_id) % 8 * 3
        return list(range(first + 2, first - 1, -1))

    # ---- what the roles do -------------------------------------------------------------------------------------

    @precondition(lambda self: self.next_id < 8)
    @rule()
    def request(self) -> None:
        self.waiting["p"].add(str(self.next_id))
        self.waiting["d"].add(str(self.next_id))
        self.next_id += 1

    @precondition(lambda self: self.waiting["p"])
    @rule(data=st.data())
    def open_sender(self, data: st.DataObject) -> None:
        self.start_sender(data.draw(st.sampled_from(sorted(self.waiting["p"]))))

    def start_sender(self, request_id: str) -> None:
        self.waiting["p"].remove(request_id)
        self.computed[request_id] = 0
        self.p.store.write(self.p_table(request_id), 0, self.kv(request_id))
        self.p.link.open_sender(request_id, self.d.ref, self.p_table(request_id), NUM_TOKENS, self.cluster.clock.now)
        self.collect()

    @precondition(lambda self: self.waiting["d"])
    @rule(data=st.data(), first_missing=st.integers(0, NUM_TOKENS))
    def open_receiver(self, data: st.DataObject, first_missing: int) -> None:
        self.start_receiver(data.draw(st.sampled_from(sorted(self.waiting["d"]))), first_missing)

    def start_receiver(self, request_id: str, first_missing: int) -> None:
        self.waiting["d"].remove(request_id)
        self.first_missing[request_id] = first_missing
        self.d.store.write(self.d_table(request_id), 0, self.kv(request_id)[:, :, :, :first_missing])
        now = self.cluster.clock.now
        self.d.link.open_receiver(request_id, self.p.ref, self.d_table(request_id), first_missing, NUM_TOKENS, now)
        self.collect()

    @precondition(lambda self: self.waiting["p"] & self.waiting["d"])
    @rule(data=st.data(), first_missing=st.integers(0, NUM_TOKENS), p_first=st.booleans())
    def open_both(self, data: st.DataObject, first_missing: int, p_first: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting["p"] & self.waiting["d"])))
        if p_first:
            self.start_sender(request_id)
        self.start_receiver(request_id, first_missing)
        if not p_first:
            self.start_sender(request_id)

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), step=st.integers(1, NUM_TOKENS), layers=st.lists(st.integers(0, 3), max_size=2))
    def compute(self, data: st.DataObject, step: int, layers: list[int]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.computed)))
        if self.computed[request_id] == NUM_TOKENS:
            return
        computed = self.computed[request_id] = min(NUM_TOKENS, self.computed[request_id] + step)
        for layers_done in sorted(layers):  # pieces of these layers may leave before the whole tokens do
            self.p.link.computing(request_id, computed, layers_done, self.cluster.clock.now)
        self.p.link.computed(request_id, computed, self.cluster.clock.now)
        if computed == NUM_TOKENS:
            self.p.link.finish(request_id, HIDDEN, 3, Timeline(), self.cluster.clock.now)
        self.collect()

    @precondition(lambda self: self.computed and len(self.disturbed) < 2)
    @rule(data=st.data())
    def abort_on_p(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.computed)))
        self.p.link.abort(request_id, "p aborts")
        del self.computed[request_id]
        self.sent[request_id] = "aborted"
        self.disturbed.add(request_id)

    @precondition(lambda self: set(self.first_missing) - set(self.received) and len(self.disturbed) < 2)
    @rule(data=st.data())
    def abort_on_d(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.first_missing) - set(self.received))))
        self.d.link.abort(request_id, "d aborts")
        self.received[request_id] = "aborted"
        self.disturbed.add(request_id)

    # ---- what the network does ---------------------------------------------------------------------------------

    @precondition(lambda self: self.network.under_way)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.network.under_way) - 1))
        if (
            not self.faulty
        ):  # a connection keeps its order; of that only this is relied on: an offer is overtaken by nothing
            offers = [n for n, (_, m) in enumerate(self.network.under_way) if isinstance(m.body, RingOffer)]
            index = min([index, *offers])
        self.network.deliver(index)
        self.collect()

    @precondition(lambda self: self.network.under_way)
    @rule()
    def deliver_many_in_order(self) -> None:
        for _ in range(10):
            if self.network.under_way:
                self.network.deliver()
                self.collect()

    @precondition(lambda self: self.faulty and self.network.under_way)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.network.deliver(data.draw(st.integers(0, len(self.network.under_way) - 1)), keep=True)
        self.collect()

    @precondition(lambda self: self.faulty and self.network.under_way and self.num_losses < 2)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.num_losses += 1
        self.network.lose(data.draw(st.integers(0, len(self.network.under_way) - 1)))

    @precondition(lambda self: self.faulty)
    @rule(seconds=st.sampled_from([0.1, 0.3 * LEASE_S, 1.5 * LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.clock.now += seconds
        self.collect()

    @rule()
    def turn(self) -> None:
        self.collect()

    @precondition(lambda self: self.faulty and not self.has_restarted)
    @rule()
    def d_restarts(self) -> None:
        """D is gone and P is told; what was under way to its old life is lost, what came from it may still arrive."""
        self.has_restarted = True
        old = self.d
        self.cluster.remove(old)
        self.p.events += self.p.link.drop_peer(old.ref)
        self.p.channels.remove_peer(old.ref)
        for request_id in set(self.first_missing) - set(self.received):
            self.received[request_id] = "died"
        self.waiting["d"].clear()
        self.waiting["p"].clear()
        self.d = self.cluster.add("decode-0", 4, 64, slots=2, slot_tokens=2, lease_s=LEASE_S)
        self.collect()

    # ---- what must hold ----------------------------------------------------------------------------------------

    def collect(self) -> None:
        for node in (self.p, self.d):
            node.turn()
        for event in self.p.take_events():
            assert isinstance(event, SendDone | SendFailed)
            assert event.request_id not in self.sent, "two ends of one hand-over"
            if isinstance(event, SendDone):
                assert self.computed[event.request_id] == NUM_TOKENS
            del self.computed[event.request_id]
            self.sent[event.request_id] = type(event).__name__
            self.p.store.write(self.p_table(event.request_id), 0, self.kv(event.request_id) * 0 - 1)  # reused
        for event in self.d.take_events():
            assert isinstance(event, HandedOver | ReceiveFailed)
            assert event.request_id not in self.received, "two ends of one hand-over"
            self.received[event.request_id] = type(event).__name__
            good = NUM_TOKENS if isinstance(event, HandedOver) else event.contiguous_tokens
            assert good >= self.first_missing[event.request_id]
            there = self.d.store.read(self.d_table(event.request_id), 0, NUM_TOKENS)
            np.testing.assert_array_equal(there[:, :, :, :good], self.kv(event.request_id)[:, :, :, :good])
            if isinstance(event, HandedOver):
                assert isinstance(event.commit, KVCommit)
                assert (event.commit.hidden, event.commit.num_cached_tokens) == (HIDDEN, 3)

    @invariant()
    def counts_are_true(self) -> None:
        p, d = self.p.link.counts(), self.d.link.counts()
        assert p.senders == len(self.computed)
        assert d.receivers == len(set(self.first_missing) - set(self.received))
        assert p.ring_slots_in_use <= 2
        assert (d.senders, d.ring_slots_in_use, p.receivers) == (0, 0, 0)

    def teardown(self) -> None:
        for request_id in sorted(self.computed):
            if request_id in self.computed and self.computed[request_id] < NUM_TOKENS:
                self.computed[request_id] = NUM_TOKENS
                self.p.link.computed(request_id, NUM_TOKENS, self.cluster.clock.now)
                self.p.link.finish(request_id, HIDDEN, 3, Timeline(), self.cluster.clock.now)
        for _ in range(200):
            if not self.network.under_way:
                break
            self.network.deliver_all()
            self.collect()
        opened_on_both = (set(self.sent) | set(self.computed)) & set(self.first_missing)
        if not self.faulty:
            for request_id in opened_on_both - self.disturbed:
                assert self.received.get(request_id) == "HandedOver"
                assert self.sent[request_id] == "SendDone"
        for _ in range(4):  # leases, then what their ends say
            self.cluster.clock.now += LEASE_S + 0.1
            self.collect()
            self.network.deliver_all()
            self.collect()
        assert not self.computed
        assert set(self.received) == set(self.first_missing)
        for node in (self.p, self.d):
            assert node.link.counts()[:3] == (0, 0, 0)
        self.a_new_request_works()
        self.cluster.close()
        shutil.rmtree(self.folder)

    def a_new_request_works(self) -> None:
        """Whatever was lost before, at most one hand-over pays for a ring that must be made anew."""
        outcomes = []
        for request_id in ("100", "101", "102"):
            self.d.store.pool[:] = self.fakes.POISON
            self.p.store.write(self.p_table(request_id), 0, self.kv(request_id))
            now = self.cluster.clock.now
            self.p.link.open_sender(request_id, self.d.ref, self.p_table(request_id), NUM_TOKENS, now)
            self.d.link.open_receiver(request_id, self.p.ref, self.d_table(request_id), 0, NUM_TOKENS, now)
            self.p.link.computed(request_id, NUM_TOKENS, now)
            self.p.link.finish(request_id, HIDDEN, 3, Timeline(), now)
            self.computed[request_id], self.first_missing[request_id] = NUM_TOKENS, 0
            for _ in range(20):
                self.network.deliver_all()
                self.collect()
            if request_id not in self.received:
                self.cluster.clock.now += LEASE_S + 0.1
                for _ in range(3):
                    self.collect()
                    self.network.deliver_all()
            self.collect()
            outcomes.append(self.received[request_id])
        assert outcomes[-1] == "HandedOver", outcomes


@pytest.mark.parametrize("faulty", [False, True], ids=["late and reordered", "lost and repeated too"])
def test_whole_prompts_or_clean_failures(fakes: ModuleType, faulty: bool) -> None:
    machine = type("Machine", (Handovers,), {"fakes": fakes, "faulty": faulty})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
