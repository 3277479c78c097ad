"""CopyStream: copies that do not wait in line behind the forward passes that have been launched."""

from contextlib import AbstractContextManager, nullcontext

import torch


class CopyStream:
    """A CUDA stream for copies; on the CPU (Triton's interpreter) everything is done at once."""

    def __init__(self, device: torch.device):
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()
