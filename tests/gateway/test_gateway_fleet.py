"""GET /workers: what each worker said of itself, and how KV travels between them."""

import msgspec

from baton.core.messages import Role, Status
from baton.gateway.fleet import describe_fleet
from baton.gateway.membership import Worker

STATUS = Status(*[0] * 15)


def test_both_ends_of_a_pair_show_its_transport(world_module):
    p, d = world_module.worker_info("prefill-0", Role.PREFILL), world_module.worker_info("decode-0", Role.DECODE)
    d = msgspec.structs.replace(d, device="NVIDIA H200", num_blocks=10, memory_note="0.9 x 140 GiB = 126 GiB")
    status = msgspec.structs.replace(STATUS, transports={"prefill-0": "cuda_ipc", "prefill-1": "tcp"})
    entries = describe_fleet([Worker(p, 0.0), Worker(d, 0.0, status)])
    assert entries[0] == {
        "id": "decode-0",
        "roles": ["decode"],
        "pid": 1,
        "device": "NVIDIA H200",
        "threads": 1,
        "kv_tokens": 160,
        "context_length": 1024,
        "max_running": 64,
        "transports": {"prefill-0": "cuda_ipc", "prefill-1": "tcp"},  # prefill-1 has just left
        "memory_note": "0.9 x 140 GiB = 126 GiB",
    }
    assert (entries[1]["id"], entries[1]["transports"]) == ("prefill-0", {"decode-0": "cuda_ipc"})
