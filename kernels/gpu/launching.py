"""What every launcher shares: checks that name the argument, and compile options that do not depend on defaults."""

import os
from functools import cache

import torch
from torch import Tensor

# The interpreter replaces the compiler when triton is imported, so this is true for the whole process or not at all.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def require(condition: bool, message: str) -> None:
    """Raises ValueError. A wrong shape that reached a kernel would be a stray write, not an error."""
    if not condition:
        raise ValueError(message)


def require_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `tensor` has this shape (None: any size) and one of the dtypes (none given: any)."""
    fits = len(shape) == tensor.dim() and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=False)
    )
    require(fits, f"{name} has shape {list(tensor.shape)}, {[s if s is not None else '*' for s in shape]} is needed")
    require(not dtypes or tensor.dtype in dtypes, f"{name} is {tensor.dtype}, {dtypes} is needed")


def compile_options(num_warps: int, num_stages: int) -> dict[str, int | bool]:
    """Keyword arguments of a launch. Fusing multiply and add is said explicitly: the default flips in triton 3.10."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


@cache
def capability_of(device: torch.device) -> int:
    """80, 90 or 100: the family whose configurations fit this device (90 under the interpreter)."""
    if INTERPRETED or device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return {9: 90, 10: 100}.get(major, 80)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors, for grids that fill the device once (2 under the interpreter)."""
    if INTERPRETED or device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
