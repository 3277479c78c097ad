"""What the machine is: card, driver, versions."""

import importlib.util
import os
import platform
from importlib.metadata import version

import torch
import triton

from baton import __version__
from baton.engine.measuring.limits import DeviceLimits
from baton.launch.gpus import list_gpus

from .package import has_stand_in
from .report import Report, Row


def find_facts(report: Report, device: torch.device, *, is_tiny: bool) -> dict[str, object]:
    listing = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    facts: dict[str, object] = {
        "baton": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "driver": listing.driver or listing.problem,
        "is_dry_run": is_tiny,
        "checksums of host memory": "a stand-in: xxhash is not installed" if has_stand_in() else "xxhash",
        "transformers": version("transformers") if importlib.util.find_spec("transformers") else "not installed",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "card": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "multiprocessors": properties.multi_processor_count,
            "cards": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        }
    for name, value in facts.items():
        report.add(Row("facts", name, str(value)))
    return facts


def add_limits(report: Report, limits: DeviceLimits | None) -> None:
    """None: a dry run, which times nothing."""
    if limits is None:
        report.add(Row("limits", "copy bandwidth, matrix product", "not timed"))
        return
    report.add(Row("limits", "copy bandwidth", f"{limits.bytes_per_second / 1e12:.3f} TB/s"))
    for dtype, rate in limits.flops_per_second.items():
        report.add(Row("limits", f"matrix product, {dtype}", f"{rate / 1e12:.1f} TFLOP/s"))
