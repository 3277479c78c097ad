"""What part of the card's measured limits each kernel reaches, in the three model shapes."""

import contextlib
import itertools
from collections.abc import Iterator

import torch

from baton.engine.measuring.case import Case
from baton.engine.measuring.gpu_cases import GpuSizes, gpu_cases
from baton.engine.measuring.limits import DeviceLimits, measure_limits
from baton.engine.measuring.measure import measure
from baton.engine.measuring.timing import timer_for
from baton.kernels.gpu.model_shapes import MODEL_SHAPES, ModelShape

from .report import Report, Row

SIZES = GpuSizes(rows=(1, 256, 8192), sampled_rows=(1, 256))
TINY_SIZES = GpuSizes((2,), (2,), ((2, 20),), ((0, 9),), 6, 1001, 10, 4)
_BUDGET_S = 0.02
_LEFT_FOR_OTHERS_S = 200.0


def _shapes(*, is_tiny: bool) -> Iterator[ModelShape]:
    for shape in MODEL_SHAPES:
        if not is_tiny:
            yield shape
        elif shape.num_experts:
            yield ModelShape(shape.name, 32, 32, 2, 4, 2, 16, 101, True, 4, 2, 16)


def _cases(device: torch.device, *, is_tiny: bool) -> Iterator[tuple[ModelShape, Case]]:
    dtype, sizes = (torch.float32, TINY_SIZES) if is_tiny else (torch.bfloat16, SIZES)
    for shape in _shapes(is_tiny=is_tiny):
        for case in gpu_cases(shape, device, dtype, sizes):
            yield shape, case


@torch.inference_mode()
def compile_kernels(device: torch.device, shard: int, num_shards: int, *, is_tiny: bool) -> None:
    """Run every `num_shards`-th case once: Triton's cache on disk then has it for the process that measures."""
    own = (case for _, case in _cases(device, is_tiny=is_tiny) if "torch" not in case.op)
    for case in itertools.islice(own, shard, 4 if is_tiny else None, num_shards):
        with contextlib.suppress(Exception):  # measuring meets it again, and says it
            case.make()()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def limits_of(device: torch.device) -> DeviceLimits:
    return measure_limits(timer_for(device), device, ("bfloat16", "float32"))


def goals(*, is_tiny: bool) -> list[tuple[str, str]]:
    cases = _cases(torch.device("meta"), is_tiny=is_tiny)  # no case is made, so the device does not matter
    return [("fraction", _label(shape.name, case)) for shape, case in cases if case.goal or case.goal_flops]


def _label(model: str, case: Case) -> str:
    return f"{model}: {case.op}, {case.size}"


@torch.inference_mode()
def run_kernels(report: Report, device: torch.device) -> None:
    """For the dry run: every case once, without a time, which would mean nothing. On the CPU there is no cuBLAS."""
    for shape, case in _cases(device, is_tiny=True):
        label = _label(shape.name, case).replace("cuBLAS", "torch")
        try:
            case.make()()
        except Exception as error:  # as in `measure`: a finding, and the next case goes on
            report.add(Row("fraction", label, "failed", f"{type(error).__name__}: {error}".splitlines()[0], False))
            continue
        report.add(Row("fraction", label, "runs, not timed"))


def measure_kernels(report: Report, device: torch.device, limits: DeviceLimits) -> None:
    """A row for each case, while there is time."""
    timer = timer_for(device)
    for name, group in itertools.groupby(_cases(device, is_tiny=False), key=lambda pair: pair[0].name):
        for result in measure((case for _, case in group), timer, limits, _BUDGET_S):
            label = _label(name, result.case)
            data = {"model": name, **result.as_json()}
            if result.timing is None or result.fraction is None:
                report.add(Row("fraction", label, "failed", result.problem, False, data))
                continue
            ok = result.fraction >= result.goal if result.goal else None
            goal = f", goal {result.goal:.0%}" if result.goal else ""
            goal += " ?" if result.is_doubtful else ""
            value = f"{result.fraction:6.1%} of {result.bound}"
            report.add(Row("fraction", label, value, f"{result.timing.median * 1e6:,.1f} us{goal}", ok, data))
            if report.seconds_left < _LEFT_FOR_OTHERS_S:
                report.add(Row("fraction", "the other cases", "not measured", "no time", None, {"skipped": True}))
                return
