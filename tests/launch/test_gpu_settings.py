"""Settings of workers on GPUs: what is fixed before they start, by literals, and what is left to be measured."""

import msgspec
import pytest

from baton.core.errors import ConfigurationError
from baton.core.messages import Role
from baton.launch.child_process import child_spec
from baton.launch.options import EngineFlags, HostPort, PoolFlags, parse_engine_options
from baton.launch.placement import place_workers
from baton.launch.resolve import require_weights_fit
from baton.launch.serve import choose_devices
from baton.launch.topology import Cluster, device_ring_bytes, local_worker_configs, worker_places

MIB, GIB = 1024**2, 1024**3
CLUSTER = Cluster("/run/b", "/run/b/key", HostPort("127.0.0.1", 1), HostPort("127.0.0.1", 2), "m", "info", False)


@pytest.fixture
def llama(builders):
    """Llama-3.1-8B: 32 x 2 x 8 x 128 x 2 bytes = 128 KiB a token."""
    return msgspec.structs.replace(
        builders.SMOLLM2,
        name="Llama-3.1-8B",
        note="",
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        num_parameters=8_030_261_248,
    )


@pytest.fixture
def resolve_gpu(builders, llama):
    def resolve(count: int = 1, **flags: object):
        return builders.resolve(parse_engine_options(EngineFlags(**flags)), builders.gpu_machine(count), llama, 2)

    return resolve


def test_the_pool_is_left_to_the_worker(resolve_gpu):
    resolved = resolve_gpu()
    engine = resolved.engine
    assert (engine.device, engine.kernels, engine.dtype) == ("cuda", "triton", "bfloat16")
    assert (engine.num_blocks, engine.kv_bytes, engine.threads) == (0, 0, 1)
    assert (resolved.context_length, resolved.context_may_shrink) == (131_072, True)
    assert resolved.explanation == (
        "Llama-3.1-8B: 8,030.3 million bfloat16 weights, 15.0 GiB a worker, context up to 131,072 tokens, "
        "triton kernels",
        "KV cache: 128 KiB a token; each worker takes what weights, activations, graphs and rings leave of its share "
        "of a card, measured once it has loaded",
    )


def test_what_the_user_fixes(resolve_gpu):
    resolved = resolve_gpu(
        kv_memory="4G", context_length="8000", max_running="10", threads="3", token_budget="100", deterministic=True
    )
    engine = resolved.engine
    assert (engine.num_blocks, engine.kv_bytes, engine.threads, engine.deterministic) == (0, 4 * GIB, 3, True)
    assert (resolved.context_length, resolved.context_may_shrink) == (8000, False)
    assert resolved.engine_config(decode=True, share=0.5, ring_bytes=7).max_batch == 10
    assert resolved.scheduler(decode=False).token_budget == resolved.scheduler(decode=True).token_budget == 100
    assert "--deterministic" in resolved.explanation[0]
    assert resolved.explanation[1] == "KV cache: 4.00 GiB (--kv-memory) / 128 KiB a token = 32,768 tokens a worker"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"context_length": "131073"}, ["--context-length 131073", "131072"]),
        ({"context_length": "4"}, ["--context-length 4", "at least 16"]),
        ({"kv_memory": "16M"}, ["--kv-memory 16.0 MiB holds 128 tokens", "256"]),
        ({"kv_memory": "1G", "context_length": "8193"}, ["--context-length 8193", "8192 tokens", "--kv-memory"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(resolve_gpu, flags, words):
    with pytest.raises(ConfigurationError) as caught:
        resolve_gpu(**flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_each_worker_gets_its_card_and_its_share(builders, llama, resolve_gpu):
    placement = place_workers(1, 2, builders.cards(2))
    prefill, decode, other = local_worker_configs(CLUSTER, llama, resolve_gpu(), worker_places(1, 2, placement))
    assert [w.worker_id for w in (prefill, decode, other)] == ["prefill-0", "decode-0", "decode-1"]
    assert [w.roles[0] for w in (prefill, decode, other)] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert [w.device_uuid for w in (prefill, decode, other)] == ["GPU-0000-aaaa", "GPU-1111-aaaa", "GPU-1111-aaaa"]
    assert decode.device_name == "NVIDIA H200"
    assert [w.engine.device_memory_share for w in (prefill, decode, other)] == [0.9, 0.45, 0.45]
    assert [w.engine.max_batch for w in (prefill, decode, other)] == [0, 256, 256]  # graphs are for decode steps
    assert [s.token_budget for s in (prefill.prefill, decode.decode)] == [8192, 2048]
    assert [w.engine.token_budget for w in (prefill, decode)] == [8192, 2048]
    # 16 slots of 2 MiB, to and from each peer and two that may join
    assert [w.engine.ring_bytes for w in (prefill, decode)] == [2 * 4 * 32 * MIB, 2 * 3 * 32 * MIB]
    assert [s.chunk_size for s in (prefill.prefill, decode.decode)] == [4096, 2048]
    assert [s.max_running for s in (prefill.prefill, decode.decode)] == [256, 256]
    assert prefill.context_may_shrink


def test_a_role_that_comes_later_keeps_to_the_memory_that_was_measured(builders, llama, resolve_gpu):
    placement = place_workers(1, 2, builders.cards(3))
    resolved = resolve_gpu(ttft_target="1s", tpot_target="50ms")
    prefill, decode, _ = local_worker_configs(CLUSTER, llama, resolved, worker_places(1, 2, placement))
    assert (decode.prefill.token_budget, decode.prefill.chunk_size) == (2048, 2048)
    assert decode.prefill.token_budget_range == (16, 2048)
    assert (prefill.decode.token_budget, prefill.decode.max_running) == (2048, 256)


def test_elastic_workers_have_memory_for_both_roles(builders, llama, resolve_gpu):
    placement = place_workers(1, 2, builders.cards(3))
    resolved = resolve_gpu(elastic=True)
    workers = local_worker_configs(CLUSTER, llama, resolved, worker_places(1, 2, placement, is_elastic=True))
    assert [w.engine.max_batch for w in workers] == [256] * 3
    assert [w.engine.token_budget for w in workers] == [8192] * 3
    assert [w.engine.ring_bytes for w in workers] == [2 * 4 * 32 * MIB] * 3
    assert [(w.prefill.token_budget, w.decode.token_budget) for w in workers] == [(8192, 2048)] * 3
    assert [w.roles for w in workers] == [(Role.PREFILL,), (Role.DECODE,), (Role.DECODE,)]


def test_rings_in_host_memory_take_only_staging_on_the_card():
    assert [device_ring_bytes(t, 3) for t in ("tcp", "pinned_memory", "shared_memory")] == [4 * MIB] * 3
    assert [device_ring_bytes(t, 0) for t in ("auto", "cuda_ipc")] == [128 * MIB] * 2
    assert device_ring_bytes("nccl", 0) == 128 * MIB + 4 * 100 * MIB


def test_a_process_sees_its_own_card_and_no_other(builders, llama, resolve_gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    placement = place_workers(1, 1, builders.cards(2))
    configs = local_worker_configs(CLUSTER, llama, resolve_gpu(), worker_places(1, 1, placement))
    assert [child_spec(c).environment["CUDA_VISIBLE_DEVICES"] for c in configs] == ["GPU-0000-aaaa", "GPU-1111-aaaa"]
    assert child_spec(configs[0]).environment["OMP_NUM_THREADS"] == "1"
    assert child_spec(builders.worker_config("decode-0")).environment["CUDA_VISIBLE_DEVICES"] == ""  # on the CPU


def test_a_share_that_the_weights_fill_is_refused(builders, llama):
    small = builders.cards(1, total_bytes=16 * GIB, free_bytes=16 * GIB)
    with pytest.raises(ConfigurationError, match=r"does not fit.* 15\.0 GiB.* 90% of cuda:0 .* 14\.4 GiB"):
        require_weights_fit(llama, "bfloat16", place_workers(0, 1, small).decode)
    require_weights_fit(llama, "int8", place_workers(0, 1, small).decode)
    unknown = builders.cards(1, total_bytes=0)
    require_weights_fit(llama, "bfloat16", place_workers(0, 1, unknown).decode)


# ---- from flags to devices -------------------------------------------------------------------------------------


def _choose(machine, *, prefill_devices: str = "auto", decode_devices: str = "auto", **flags: object):
    pools = PoolFlags(1, 1, prefill_devices, decode_devices)
    return choose_devices(parse_engine_options(EngineFlags(**flags)), pools, machine)


def test_devices_of_a_server(builders):
    compute, placement = _choose(builders.gpu_machine(4))
    assert compute.device == "cuda"
    assert [gpu.index for gpu in placement.gpus] == [0, 1]
    _, placement = _choose(builders.gpu_machine(4), prefill_devices="3", decode_devices="0")
    assert [gpu.index for gpu in placement.gpus] == [3, 0]
    _, placement = _choose(builders.gpu_machine(4), device="cuda:2")
    assert [gpu.index for gpu in placement.gpus] == [2]
    assert _choose(builders.gpu_machine(4), device="cpu")[1] is None
    assert _choose(builders.MACHINE)[1] is None


def test_only_the_cards_in_use_decide_the_dtype(builders):
    old, new = builders.cards(2, capability=75)
    new = msgspec.structs.replace(new, capability=90)
    machine = builders.gpu_machine().with_gpus((old, new))
    assert _choose(machine)[0].dtype == "float16"
    assert _choose(machine, device="cuda:1", dtype="bfloat16")[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device": "cuda:7"}, "--device cuda:7: there is no card '7'"),
        ({"device": "cpu", "decode_devices": "0"}, "--decode-devices 0 names cards.*CPU: --device cpu"),
        ({"transport": "nccl", "decode_devices": "0", "prefill_devices": "0"}, "--transport nccl"),
    ],
)
def test_devices_that_cannot_be(builders, flags, words):
    with pytest.raises(ConfigurationError, match=words):
        _choose(builders.gpu_machine(2), **flags)


def test_cards_are_named_where_there_are_none(builders):
    with pytest.raises(ConfigurationError, match=r"--prefill-devices 0 names cards.*there is no card"):
        _choose(builders.MACHINE, prefill_devices="0")
