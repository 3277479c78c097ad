"""GET and POST /roles: what each worker does, changed while requests run; no pool that is needed is emptied."""

import asyncio

import msgspec

from baton.core.messages import GenerateRequest, PrefillRequest, Role, SetRoles, Status
from baton.gateway.elastic import Elastic, PoolWaits
from baton.gateway.role_table import CONFIRM_TIMEOUT_S

PREFILL, DECODE = Role.PREFILL, Role.DECODE
STATUS = Status(0, 0, 0, 256, 0, 0, 0, 0, 256, 0, 0, 0, 0, 0, 0)
BODY = {"model": "tiny-llama", "prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0}


def obey(worker) -> None:
    """As a real worker: a Status with the new roles."""
    deliver = worker.deliver

    def obedient(body) -> None:
        deliver(body)
        if isinstance(body, SetRoles):
            worker.say(msgspec.structs.replace(STATUS, roles=body.roles))

    worker.deliver = obedient


def test_roles_are_shown_and_changed_and_requests_follow(in_world) -> None:
    async def scenario(world) -> None:
        prefill, decode = await world.pair()
        obey(prefill)
        obey(decode)
        status, answer = await world.get("/roles")
        assert (status, answer["workers"]) == (200, {"decode-0": ["decode"], "prefill-0": ["prefill"]})
        assert (answer["elastic"], answer["changes"]) == (False, [])

        both = ["prefill", "decode"]
        status, answer = await world.answer_to("/roles", {"worker": "prefill-0", "roles": both})
        assert (status, answer["workers"]["prefill-0"]) == (200, both)
        [change] = answer["changes"]
        assert (change["worker"], change["old"], change["new"]) == ("prefill-0", "prefill", "prefill+decode")
        assert change["reason"] == "by hand"

        await world.answer_to("/roles", {"worker": "decode-0", "roles": ["prefill"]})
        for _ in range(3):  # prefill-0 is the only one that generates now
            assert (await world.answer_to("/v1/completions", BODY))[0] == 200
        assert len(prefill.of(GenerateRequest)) == 3
        assert not decode.of(GenerateRequest)

        await world.answer_to("/roles", {"worker": "prefill-0", "roles": ["decode"]})
        await world.answer_to("/roles", {"worker": "decode-0", "roles": ["decode"]})
        before = len(prefill.of(PrefillRequest)), len(decode.of(PrefillRequest))
        for _ in range(2):  # no prefill worker is left: decode workers compute prompts themselves
            assert (await world.answer_to("/v1/completions", BODY))[0] == 200
        assert (len(prefill.of(PrefillRequest)), len(decode.of(PrefillRequest))) == before
        status, ready = await world.get("/ready")
        assert ready["problem"] != "no prefill worker has joined"
        async with world.http.get(world.url + "/metrics") as response:
            text = await response.text()
        assert "baton_role_changes_total 4.0" in text
        assert 'baton_worker_role_active{active_role="decode",worker="prefill-0"} 1.0' in text

    in_world(scenario)


def test_the_last_decode_worker_keeps_its_role(in_world) -> None:
    async def scenario(world) -> None:
        prefill, decode = await world.pair()
        obey(prefill)  # decode does not answer
        status, answer = await world.answer_to("/roles", {"worker": "decode-0", "roles": ["prefill"]})
        assert status == 409
        assert "last worker that has the decode role" in answer["error"]["message"]
        # Two changes at once, each of which alone would be right: the second one counts the first.
        await world.answer_to("/roles", {"worker": "prefill-0", "roles": ["prefill", "decode"]})
        first = asyncio.create_task(world.answer_to("/roles", {"worker": "decode-0", "roles": ["prefill"]}))
        async with asyncio.timeout(5):
            while not any(isinstance(m, SetRoles) for m in decode.received):
                await asyncio.sleep(0.001)
        status, answer = await world.answer_to("/roles", {"worker": "prefill-0", "roles": ["prefill"]})
        assert (status, answer["error"]["param"]) == (409, "roles")
        decode.say(msgspec.structs.replace(STATUS, roles=(PREFILL,)))
        assert (await first)[0] == 200

    in_world(scenario)


def test_what_cannot_be_asked_for_is_refused_with_what_can(in_world) -> None:
    async def scenario(world) -> None:
        await world.pair()
        for body, code, words in (
            ({"worker": "decode-9", "roles": ["decode"]}, 404, "there are: decode-0, prefill-0"),
            ({"worker": "decode-0", "roles": []}, 400, "at least one role"),
            ({"worker": "decode-0", "roles": ["cook"]}, 400, "Invalid enum value 'cook'"),
            ({"worker": "decode-0"}, 400, "missing required field `roles`"),
            ({"worker": "decode-0", "roles": ["decode"], "x": 1}, 400, "unknown field `x`"),
            ([], 400, "Expected `object`"),
        ):
            status, answer = await world.answer_to("/roles", body)
            assert (status, words in answer["error"]["message"]) == (code, True), answer

    in_world(scenario)


def test_a_worker_that_does_not_answer_costs_a_bounded_wait(in_world) -> None:
    async def scenario(world) -> None:
        await world.pair()
        world.gateway.roles.tick(0.0)
        before = asyncio.get_running_loop().time()
        status, answer = await world.answer_to("/roles", {"worker": "prefill-0", "roles": ["decode"]})
        assert status == 503
        assert "has not answered" in answer["error"]["message"]
        assert asyncio.get_running_loop().time() - before < CONFIRM_TIMEOUT_S + 2

    in_world(scenario)


def test_a_worker_that_leaves_meanwhile_is_told_of(in_world) -> None:
    async def scenario(world) -> None:
        prefill, _ = await world.pair()
        deliver = prefill.deliver
        prefill.deliver = lambda body: prefill.leave() if isinstance(body, SetRoles) else deliver(body)
        status, answer = await world.answer_to("/roles", {"worker": "prefill-0", "roles": ["decode"]})
        assert (status, "just left" in answer["error"]["message"]) == (503, True)

    in_world(scenario)


def test_with_elastic_a_queue_of_the_decode_pool_brings_it_help(in_world) -> None:
    async def scenario(world) -> None:
        prefill, _ = await world.pair()
        obey(prefill)
        table = world.gateway.roles
        elastic = Elastic(None)
        table._rule = lambda now, masks: elastic.update(now, PoolWaits(0.1, 9.0), masks)
        for now in range(7):
            table.tick(1000.0 + now)
        async with asyncio.timeout(5):
            while (await world.get("/roles"))[1]["workers"]["prefill-0"] != ["prefill", "decode"]:
                await asyncio.sleep(0.001)
        answer = (await world.get("/roles"))[1]
        assert answer["elastic"] is True
        assert "predicted wait" in answer["changes"][0]["reason"]

    in_world(scenario, is_elastic=True)


def test_probes_never_ask_a_worker_to_hand_over_to_itself(in_world) -> None:
    async def scenario(world) -> None:
        a, b = world.worker("a", PREFILL, DECODE), world.worker("b", PREFILL, DECODE)
        async with asyncio.timeout(10):
            while (await world.get("/ready"))[0] != 200:
                await asyncio.sleep(0.01)
        for worker in (a, b):
            probes = [m for m in worker.received if isinstance(m, GenerateRequest)]
            assert all(m.prefill != worker.ref for m in probes)
        assert any(m.prefill is not None for w in (a, b) for m in w.received if isinstance(m, GenerateRequest))

    in_world(scenario)
