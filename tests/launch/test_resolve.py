"""Auto settings by literals: worked out by hand, so that a change of the arithmetic shows."""

import msgspec
import pytest

from baton.core.errors import ConfigurationError

GIB = 1024**3
MIB = 1024**2
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4  # layers, key and value, heads, head_dim, float32 = 46,080


def test_smollm2_on_a_laptop_of_eight_gib(builders):
    resolved = builders.resolve(builders.AUTO, builders.MACHINE, builders.SMOLLM2, 2)
    # 8 GiB - 2 x (269,030,016 + 400 MiB) = 7,213,013,760; x 0.4 / 2 = 1,442,602,752; / (16 x 46,080) = 1956.6
    assert resolved.engine.num_blocks == 1956
    assert resolved.pool_tokens == 31_296
    assert resolved.context_length == 8192
    assert resolved.engine.threads == 1
    assert resolved.engine.dtype == "float16"
    assert resolved.max_running == 64
    assert resolved.explanation == (
        "SmolLM2-135M-Instruct: 134.5 million float16 weights (from Q4_1), context 8,192 of 8,192 tokens, "
        "1 of 2 core(s) a worker",
        "KV cache: (8.00 GiB available - 1.28 GiB for 2 worker(s) with weights) x 40% / 2 = 1.34 GiB"
        " / 45.0 KiB a token = 31,296 tokens a worker",
    )


def test_batch_limits_by_role(builders):
    resolved = builders.resolve(builders.AUTO, builders.MACHINE, builders.SMOLLM2, 2)
    prefill, decode = resolved.scheduler(decode=False), resolved.scheduler(decode=True)
    assert (prefill.token_budget, prefill.chunk_size, prefill.max_running) == (512, 256, 64)
    assert (decode.token_budget, decode.chunk_size, decode.max_running) == (256, 256, 64)


def test_tuners_may_move_what_the_user_has_not_fixed(builders):
    """To the knee of the curve, or with a target for it: then prefill steps may be as small as decode's."""

    def ranges(decode, **changes):
        options = msgspec.structs.replace(builders.AUTO, **changes)
        scheduler = builders.resolve(options, builders.MACHINE, builders.SMOLLM2, 2).scheduler(decode=decode)
        return scheduler.token_budget_range, scheduler.max_running_range

    assert ranges(decode=False) == ((64, 1024), (1, 64))
    assert ranges(decode=True) == ((16, 512), (1, 64))
    assert ranges(decode=False, token_budget=100) == ranges(decode=True, token_budget=100) == ((100, 100), (1, 64))
    assert ranges(decode=False, ttft_target_s=0.5) == ((16, 1024), (1, 64))
    assert ranges(decode=True, tpot_target_s=0.05) == ((16, 512), (1, 64))
    assert ranges(decode=True, tpot_target_s=0.05, max_running=9, token_budget=100) == ((100, 100), (9, 9))


def test_what_the_user_sets_is_kept(builders):
    options = msgspec.structs.replace(
        builders.AUTO,
        dtype="float32",
        block_size=64,
        kv_memory=GIB,
        threads=5,
        context_length=1000,
        max_running=3,
        token_budget=100,
    )
    resolved = builders.resolve(options, builders.MACHINE, builders.SMOLLM2, 2)
    engine = resolved.engine
    assert (engine.dtype, engine.block_size, engine.threads) == ("float32", 64, 5)
    assert engine.num_blocks == GIB // (64 * BYTES_PER_TOKEN) == 364
    assert resolved.context_length == 1000
    assert resolved.scheduler(decode=True).token_budget == resolved.scheduler(decode=False).token_budget == 100
    assert resolved.scheduler(decode=True).max_running == 3


@pytest.mark.parametrize(
    ("cores", "workers", "taken", "threads"),
    [(2, 2, 0, 1), (2, 1, 0, 2), (8, 3, 0, 2), (1, 4, 0, 1), (8, 1, 4, 4), (2, 1, 1, 1)],
)
def test_threads_share_the_cores_out(builders, cores, workers, taken, threads):
    machine = msgspec.structs.replace(builders.MACHINE, cores=cores)
    assert builders.resolve(builders.AUTO, machine, builders.SMOLLM2, workers, taken).engine.threads == threads


def test_plain_float32_where_fbgemm_is_absent(builders):
    machine = msgspec.structs.replace(builders.MACHINE, architecture="aarch64")
    assert builders.resolve(builders.AUTO, machine, builders.SMOLLM2, 2).engine.dtype == "float32"


def test_the_context_shrinks_to_the_pool(builders):
    options = msgspec.structs.replace(builders.AUTO, kv_memory=100 * MIB)
    resolved = builders.resolve(options, builders.MACHINE, builders.SMOLLM2, 2)
    assert resolved.pool_tokens == resolved.context_length == 100 * MIB // (16 * BYTES_PER_TOKEN) * 16 == 2272


def test_auto_takes_no_more_than_can_be_used(builders):
    machine = msgspec.structs.replace(builders.MACHINE, memory=512 * GIB)
    assert builders.resolve(builders.AUTO, machine, builders.SMOLLM2, 2).pool_tokens == 2 * GIB // (16 * 46_080) * 16
    small = msgspec.structs.replace(builders.SMOLLM2, max_position_embeddings=128, num_layers=1)
    options = msgspec.structs.replace(builders.AUTO, max_running=4)
    assert builders.resolve(options, machine, small, 2).pool_tokens == 4 * 128


@pytest.mark.parametrize(
    ("changes", "machine_changes", "num_workers", "words"),
    [
        ({"context_length": 4}, {}, 2, ["--context-length 4", "at least 16"]),
        ({"context_length": 9000}, {}, 2, ["--context-length 9000", "8192"]),
        ({"context_length": 4096, "kv_memory": 100 * MIB}, {}, 2, ["--context-length 4096", "2272", "--kv-memory"]),
        ({"kv_memory": 5 * GIB}, {}, 2, ["--kv-memory 5.00 GiB", "6.72 GiB", "auto"]),
        ({"kv_memory": MIB}, {}, 2, ["--kv-memory", "256", "11.2 MiB"]),
        ({}, {"memory": GIB}, 2, ["does not fit", "1.00 GiB", "fewer workers"]),
        ({}, {"memory": 1340 * MIB}, 2, ["the memory left", "256"]),
        ({"dtype": "float16"}, {"architecture": "arm64"}, 2, ["--dtype float16", "arm64", "--dtype float32"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(builders, changes, machine_changes, num_workers, words):
    options = msgspec.structs.replace(builders.AUTO, **changes)
    machine = msgspec.structs.replace(builders.MACHINE, **machine_changes)
    with pytest.raises(ConfigurationError) as caught:
        builders.resolve(options, machine, builders.SMOLLM2, num_workers)
    assert all(word in str(caught.value) for word in words), str(caught.value)
