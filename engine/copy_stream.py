"""CopyStream: copies that do not wait in line behind the forward passes that have been launched."""

from contextlib import AbstractContextManager, nullcontext

import torch

HIGH_PRIORITY = -1  # 0 is that of forward passes


class CopyStream:
    """A CUDA stream for copies; on the CPU (Triton's interpreter) everything is done at once.

    Of high priority: a copy's few blocks get the next places that become free. Else they would wait until all blocks of
    the product that runs are placed, once for each copy that the host waits for.
    """

    def __init__(self, device: torch.device):
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
