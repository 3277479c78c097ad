"""Where the time of a forward pass goes, beside what the machine allows.

    python scripts/profile_engine.py MODEL_FOLDER [--dtype float16|float32] [--threads N]

Prints, for a prefill of 256 tokens and decode steps of 1, 8 and 16 sequences at 256 tokens of context: the step, the
linear layers alone, attention alone, the rest, and two floors: the weight bytes at the measured read bandwidth and the
linear layers' FLOP at the measured rate of a large matrix product. All figures are the best of several runs that
take turns, so that a busy machine disturbs them alike.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from baton.core.config import EngineConfig
from baton.engine.engine import Engine, load_engine
from baton.engine.feedback import make_feedback
from baton.engine.forward_batch import Chunk, ForwardBatch, build_forward_batch
from baton.engine.staging import HostStager
from baton.kernels import AttentionRule
from baton.kernels.cpu import pack_linear, paged_attention, store_kv

BLOCK_SIZE = 16
CONTEXT = 256
REPEATS = 15
WEIGHT_BYTES = {"float16": 2, "float32": 4}
Measured = Callable[[], object]


def best_times(measured: dict[str, Measured]) -> dict[str, float]:
    """Milliseconds, the best of `REPEATS` rounds."""
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(REPEATS):
        for name, run in measured.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def prefill_batch(num_blocks: int) -> ForwardBatch:
    return build_forward_batch([Chunk([7] * CONTEXT, 0, list(range(num_blocks)), True)], BLOCK_SIZE)


def decode_batch(size: int, num_blocks: int) -> ForwardBatch:
    """Sequences whose blocks are scattered over the whole pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    each = CONTEXT // BLOCK_SIZE
    tables = [order[i * each : (i + 1) * each] for i in range(size)]
    return build_forward_batch([Chunk([7], CONTEXT - 1, table, True) for table in tables], BLOCK_SIZE)


def linear_parts(engine: Engine, num_tokens: int) -> Measured:
    """The matrix products of all layers on `num_tokens` rows, and nothing else."""
    config = engine.model_config
    hidden = torch.randn(num_tokens, config.hidden_size)
    attended = torch.randn(num_tokens, config.num_heads * config.head_dim)
    gated = torch.randn(num_tokens, config.intermediate_size)

    def run() -> None:
        for layer in engine.runner.model.layers:
            layer.attention.qkv(hidden)
            layer.attention.out(attended)
            layer.mlp.gate_up(hidden)
            layer.mlp.down(gated)

    return run


def attention_parts(engine: Engine, batch: ForwardBatch) -> Measured:
    """Writing keys and values and attention in all layers."""
    config, layers = engine.model_config, engine.pool.layers
    heads = torch.randn(batch.num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    query = heads[:, : config.num_heads]
    key_value = heads[:, config.num_heads :].view(-1, 2, config.num_kv_heads, config.head_dim)

    stager = HostStager(engine.pool, make_feedback(torch.device("cpu")))
    rule = AttentionRule(config.attention_scale)

    def run() -> None:
        plan = stager.stage(batch).plan
        for layer in layers:
            store_kv(layer, key_value, plan)
            paged_attention(query, key_value, layer, plan, rule)

    return run


def num_layer_weights(engine: Engine) -> int:
    config = engine.model_config
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = (qkv + config.num_heads * config.head_dim) * config.hidden_size
    total: int = config.num_layers * (attention + 3 * config.intermediate_size * config.hidden_size)
    return total


def read_bandwidth() -> float:
    """Bytes per millisecond that one sum over 256 MiB reads."""
    memory = torch.ones(64 * 1024 * 1024)
    return float(memory.nbytes) / best_times({"read": memory.sum})["read"]


def gemm_rate(dtype: str) -> float:
    """FLOP per millisecond of a matrix product that is large in every direction."""
    x, linear = torch.randn(512, 1024), pack_linear(torch.randn(1024, 1024), None, dtype)
    return 2 * 512 * 1024 * 1024 / best_times({"gemm": lambda: linear(x)})["gemm"]


def report(engine: Engine, name: str, batch: ForwardBatch, floors: tuple[float, float]) -> None:
    hidden: Tensor = engine.runner.forward(batch)
    times = best_times(
        {
            "step": lambda: engine.runner.forward(batch),
            "linear": linear_parts(engine, batch.num_tokens),
            "attention": attention_parts(engine, batch),
            "lm_head": lambda: engine.runner.logits(hidden),
        }
    )
    rest = times["step"] - times["linear"] - times["attention"]
    read_floor, flop_floor = floors
    print(
        f"{name:<14}{times['step']:>9.1f}{times['linear']:>9.1f}{times['attention']:>11.1f}{rest:>8.1f}"
        f"{times['lm_head']:>9.1f}{times['step'] / times['linear']:>14.2f}{read_floor:>12.1f}"
        f"{flop_floor * batch.num_tokens:>12.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder")
    parser.add_argument("--dtype", choices=sorted(WEIGHT_BYTES), default="float16")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    num_blocks = 16 * CONTEXT // BLOCK_SIZE
    start = time.perf_counter()
    engine = load_engine(
        EngineConfig(arguments.model_folder, "cpu", "torch", arguments.dtype, BLOCK_SIZE, num_blocks, arguments.threads)
    )
    weights = num_layer_weights(engine)
    print(f"loaded in {time.perf_counter() - start:.2f} s; {torch.backends.cpu.get_cpu_capability()}")
    print(f"milliseconds, the best of {REPEATS}")
    with torch.inference_mode():
        bandwidth, rate = read_bandwidth(), gemm_rate(arguments.dtype)
        floors = (weights * WEIGHT_BYTES[arguments.dtype] / bandwidth, 2 * weights / rate)
        print(f"read bandwidth {bandwidth / 1e6:.1f} GB/s, matrix product {rate / 1e6:.0f} GFLOP/s")
        print(
            f"{'':<14}{'step':>9}{'linear':>9}{'attention':>11}{'rest':>8}{'lm_head':>9}{'step/linear':>14}"
            f"{'read floor':>12}{'FLOP floor':>12}"
        )
        report(engine, f"prefill {CONTEXT}", prefill_batch(num_blocks), floors)
        for size in (1, 8, 16):
            report(engine, f"decode {size}", decode_batch(size, num_blocks), floors)


if __name__ == "__main__":
    main()
