"""GET /workers and GET /tuner: what each worker said of itself, of the way of its KV, and of its steps."""

import msgspec

from baton.core.messages import Role, Status
from baton.core.step_cost import StepCost
from baton.core.tuner_event import TunerEvent
from baton.gateway.fleet import describe_fleet, describe_tuning
from baton.gateway.membership import Worker

STATUS = Status(*[0] * 15)


def test_both_ends_of_a_pair_show_its_transport(world_module):
    p, d = world_module.worker_info("prefill-0", Role.PREFILL), world_module.worker_info("decode-0", Role.DECODE)
    d = msgspec.structs.replace(d, device="NVIDIA H200", num_blocks=10, memory_note="0.9 x 140 GiB = 126 GiB")
    status = msgspec.structs.replace(STATUS, transports={"prefill-0": "cuda_ipc", "prefill-1": "tcp"})
    backlogs = {d.ref: {Role.DECODE: 0.25}}
    entries = describe_fleet([Worker(p, 0.0), Worker(d, 0.0, status)], backlogs)
    assert entries[0] == {
        "id": "decode-0",
        "roles": ["decode"],
        "pid": 1,
        "device": "NVIDIA H200",
        "threads": 1,
        "kv_tokens": 160,
        "context_length": 1024,
        "max_running": 64,
        "backlog_s": {"decode": 0.25},
        "transports": {"prefill-0": "cuda_ipc", "prefill-1": "tcp"},  # prefill-1 has just left
        "memory_note": "0.9 x 140 GiB = 126 GiB",
    }
    assert (entries[1]["id"], entries[1]["transports"]) == ("prefill-0", {"decode-0": "cuda_ipc"})
    assert entries[1]["backlog_s"] == {}


def test_a_tuner_tells_what_it_learned_what_it_chose_and_why(world_module):
    d = Worker(world_module.worker_info("decode-0", Role.DECODE), 0.0)
    assert describe_tuning([d], 0.0) == []  # it has not said anything yet
    cost = StepCost(0.01, 0.001, 0.0, 0.002, 0.0, num_samples=40, relative_error=0.1)
    d.status = msgspec.structs.replace(STATUS, step_cost=cost, settings={"cap": 9})
    d.tuner_events.append(TunerEvent(5.0, "cap", 12, 9, "predicted step 61 ms over the 50 ms target"))
    d.num_tuner_events = 1
    [entry] = describe_tuning([d], 1000.0)
    assert (entry["settings"], entry["is_learned"]) == ({"cap": 9}, True)
    assert (entry["step_cost"]["per_decode_s"], entry["step_cost"]["num_samples"]) == (0.002, 40)
    assert entry["events"] == [
        {"at": 1005.0, "what": "cap", "old": 12, "new": 9, "reason": "predicted step 61 ms over the 50 ms target"}
    ]
