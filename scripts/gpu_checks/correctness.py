"""Every kernel against its definition, in every dtype: checks that know nothing of each other and run in shards."""

import itertools
import traceback
from collections.abc import Callable, Iterator

import torch

from . import check_attention, check_memory_ops, check_offsets, check_products
from .compare import Bench
from .report import Row

Check = Callable[[Bench], str]

CHECKS: dict[str, Check] = {
    "decode attention": check_attention.decode,
    "prefill attention": check_attention.prefill,
    "rms norm; add, rms norm": check_memory_ops.norms,
    "silu and mul": check_memory_ops.activation,
    "norm, rope, store": check_memory_ops.rope_store,
    "gather, scatter": check_memory_ops.block_copies,
    "checksum": check_memory_ops.checksums,
    "dense product": check_products.dense,
    "int8 product": check_products.int8,
    "experts": check_products.experts,
    "sampling, argmax": check_products.sampling,
    "penalties, bias, mask": check_products.penalties,
    "log-probabilities": check_products.logprobs,
    "offsets beyond 2^31": check_offsets.far_blocks,
}
ONCE = {"checksum", "sampling, argmax", "penalties, bias, mask", "log-probabilities"}  # they know no dtype


def all_checks(*, is_tiny: bool) -> Iterator[tuple[str, Check, torch.dtype]]:
    """Triton's interpreter computes bfloat16 wrongly."""
    dtypes = (torch.float32,) if is_tiny else (torch.bfloat16, torch.float32)
    for (name, check), dtype in itertools.product(CHECKS.items(), dtypes):
        if name not in ONCE or dtype == dtypes[0]:
            yield name, check, dtype


def goals(*, is_tiny: bool) -> list[tuple[str, str]]:
    return [("correctness", _label(name, dtype)) for name, _, dtype in all_checks(is_tiny=is_tiny)]


def _label(name: str, dtype: torch.dtype) -> str:
    return name if name in ONCE else f"{name}, {str(dtype).removeprefix('torch.')}"


@torch.inference_mode()
def run_checks(device: torch.device, shard: int, num_shards: int, *, is_tiny: bool) -> Iterator[Row]:
    """Every `num_shards`-th check, from number `shard` on."""
    for name, check, dtype in itertools.islice(all_checks(is_tiny=is_tiny), shard, None, num_shards):
        torch.manual_seed(0)
        label = _label(name, dtype)
        try:
            yield Row("correctness", label, check(Bench(device, dtype, is_tiny)), "", True)
        except Exception as error:  # an assertion, a launch that fails, memory: each is a finding
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Row("correctness", label, "wrong", text, False, {"traceback": traceback.format_exc()})
        if device.type == "cuda":
            torch.cuda.empty_cache()
