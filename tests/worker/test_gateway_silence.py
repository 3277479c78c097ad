"""Gateways that are silent, come back, or are gone while a worker still answers them."""

from baton.core.messages import Beat, CacheSnapshot, CacheSnapshotQuery, NodeRef, Role, Welcome
from baton.transfer.channels import Incoming
from baton.worker.membership import GATEWAY_SILENCE_S

PREFILL, DECODE = Role.PREFILL, Role.DECODE
PROMPT = [(7 * i * i + 3) % 101 for i in range(23)]


def test_a_step_longer_than_the_silence_allowed_is_not_silence(house, model_oracle) -> None:
    h = house()
    d = h.birth(DECODE)
    h.settle()
    runner = h.benches[d].engine.runner
    forward = runner.forward

    def slow(batch):
        h.now += GATEWAY_SILENCE_S + 1
        return forward(batch)

    runner.forward = slow
    h.generate("a", PROMPT, 3, d, None)
    for _ in range(12):
        h.network.send(h.gateway, d, Beat(0, 0))
        while h.network.pending:
            h.network.deliver(h.network.pending[0])
        h.turn(d)
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 3)
    h.assert_idle()


def test_a_gateway_that_was_stopped_for_a_while_learns_what_was_dropped_and_is_served_again(
    house, model_oracle
) -> None:
    h = house()
    p, d = h.birth(PREFILL), h.birth(DECODE)
    h.generate("a", PROMPT, 20, d, p)
    while len(h.outputs["a"]) < 3:
        h.random_step()
    h.now += GATEWAY_SILENCE_S + 1
    h.turn(d)
    h.settle()
    assert "silent" in h.failed["a"]
    h.generate("a", PROMPT, 20, d, p)  # it never knew that it was given up
    h.settle()
    assert h.outputs["a"] == model_oracle(PROMPT, 20)
    h.assert_idle()


def test_an_answer_to_a_gateway_that_is_gone_harms_nobody(house) -> None:
    h = house()
    d = h.birth(DECODE)
    gone = NodeRef("gateway-0", 99)
    for body in (CacheSnapshotQuery(), Welcome(gone, [])):
        h.network.inboxes[d].append(Incoming(gone, body))
        h.turn(d)
    h.assert_idle()


def test_each_welcome_is_followed_by_a_snapshot(house) -> None:
    """A gateway that had dropped the worker has dropped its cache index too, whatever the worker knew of it."""
    h = house()
    d = h.birth(DECODE)
    h.settle()
    h.network.send(h.gateway, d, Welcome(h.gateway, []))
    h.network.deliver((h.gateway, d))
    h.workers[d].turn(0.0)
    sent = [body for body, _ in h.network.queues[(d, h.gateway)]]
    assert any(isinstance(body, CacheSnapshot) for body in sent)
