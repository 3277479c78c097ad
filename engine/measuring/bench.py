"""KernelBench: limits, cases and measurements of one device and one model's sizes, for `baton bench kernels`."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import torch

from ...core.errors import ConfigurationError
from ...kernels.gpu.model_shapes import LLAMA_8B, MODEL_SHAPES, SMOLLM2_135M, ModelShape
from .case import Case
from .cpu_cases import cpu_cases
from .limits import measure_limits
from .measure import HEADER, Measurement, doubt_text, limits_text, measure, table_line
from .timing import timer_for

_CPU_DTYPES = ("float16", "float32")  # of weights
_GPU_DTYPES = ("bfloat16", "float32")
_BUDGET_S = 0.1  # a case
SHAPES = {shape.name.lower(): shape for shape in (SMOLLM2_135M, *MODEL_SHAPES)}


class KernelBench:
    """`run` measures and reports; afterwards `as_json` has everything. `processor`: the CPU's name.

    Raises ConfigurationError for a device that is not there, a model that is not known, and without triton on a GPU.
    """

    def __init__(self, device: str, model: str, threads: int, processor: str):
        self._device = _device(device)
        self._shape = _shape(model, self._device)
        self._results: list[Measurement] = []
        if self._device.type == "cuda":
            self._name = torch.cuda.get_device_name(self._device)
        else:
            torch.set_num_threads(max(1, threads))
            self._name = f"{processor}, {threads} thread{'s' if threads > 1 else ''}"

    @property
    def num_failed(self) -> int:
        return sum(result.timing is None for result in self._results)

    def run(self, progress: Callable[[str], None]) -> list[str]:
        """Measure everything, which takes a minute, and return the lines of the report.

        The limits are measured before and after, and the better ones count: what else a machine does slows both the
        limits and the ops, at different times. `progress` is told what is being measured.
        """
        timer = timer_for(self._device)
        dtypes = _GPU_DTYPES if self._is_gpu else _CPU_DTYPES
        progress("limits")
        before = measure_limits(timer, self._device, dtypes)
        results = list(measure(self._announced(progress), timer, before, _BUDGET_S))
        progress("limits")
        self._limits = before.or_better(measure_limits(timer, self._device, dtypes))
        self._results = [replace(result, limits=self._limits) for result in results]
        progress("")
        return [
            f"{self._shape.name} on {self._name}, torch {torch.__version__}",
            limits_text(self._limits),
            "time: median of five rounds or more; spread: slowest less fastest; of limit: floor / time",
            "",
            HEADER,
            *(table_line(result) for result in self._results),
            *doubt_text(self._results),
        ]

    def _announced(self, progress: Callable[[str], None]) -> Iterator[Case]:
        for case in self._cases():
            progress(f"{case.op}, {case.size}")
            yield case

    def as_json(self) -> dict[str, object]:
        """After `run`."""
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self._name,
            "model": self._shape.name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "limits": {
                "bytes_per_second": self._limits.bytes_per_second,
                "flops_per_second": dict(self._limits.flops_per_second),
            },
            "measurements": [result.as_json() for result in self._results],
        }

    @property
    def _is_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _cases(self) -> Iterator[Case]:
        if not self._is_gpu:
            return cpu_cases(self._shape)
        try:
            from .gpu_cases import gpu_cases  # triton is optional
        except ImportError as error:
            raise ConfigurationError(f"the kernels of a GPU need triton: {error}. Run `pip install triton`.") from error
        return gpu_cases(self._shape, self._device)


def _device(wanted: str) -> torch.device:
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(f"--device {wanted!r} is not auto, cpu or cuda")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigurationError("--device cuda: torch finds no GPU here. `baton doctor` says why; --device cpu works.")
    return torch.device("cuda", 0) if available and wanted != "cpu" else torch.device("cpu")


def _shape(wanted: str, device: torch.device) -> ModelShape:
    if wanted == "auto":
        return LLAMA_8B if device.type == "cuda" else SMOLLM2_135M
    if wanted.lower() not in SHAPES:
        raise ConfigurationError(f"--model {wanted!r} is not auto or one of {', '.join(SHAPES)}")
    return SHAPES[wanted.lower()]
