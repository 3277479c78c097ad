"""CudaDevice: the few calls of the CUDA driver that sharing memory between processes takes, through ctypes.

torch's own allocator is not used for what is shared: its expandable segments cannot be. A worker sees one card, number
0; calls work in its primary context, which is torch's as well.

It is the driver that is called and not the CUDA runtime: a refusal leaves nothing behind, while the runtime keeps the
error of a failed call for whoever asks next, which would be torch after its next kernel.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.errors import BatonError

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
# Smaller allocations share a chunk of the driver with others, and a handle is one of the whole chunk.
CHUNK_BYTES = 2 * 1024 * 1024
_LAZY_ENABLE_PEER_ACCESS = 1


class CudaError(BatonError):
    """The driver refused something."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class CudaDevice:
    """Every method raises CudaError when the driver says no."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
        self._library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
        self._call("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._context = ctypes.c_void_p()
        self._torch_device = torch.device("cuda", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        try:
            # Of high priority, as engine/copy_stream.py: a copy does not wait for the products that run.
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise CudaError(f"torch cannot use the card: {str(error).splitlines()[0]}") from error

    def allocate(self, num_bytes: int) -> int:
        """The address of fresh memory, a chunk of its own."""
        pointer, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        whole_chunks = -(-num_bytes // CHUNK_BYTES) * CHUNK_BYTES
        with self._in_context():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(whole_chunks))
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
            if base.value != pointer.value:
                self._call("cuMemFree_v2", pointer)
                raise CudaError("the driver gave memory in the middle of a chunk, which cannot be shared")
        return pointer.value

    def free(self, pointer: int) -> None:
        with self._in_context():
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, pointer: int) -> bytes:
        """A handle, of HANDLE_BYTES, with which another process can open what `allocate` returned."""
        handle = _Handle()
        with self._in_context():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address here of memory that another process exported."""
        pointer = ctypes.c_uint64()
        with self._in_context():
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                _Handle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Undo `open`."""
        with self._in_context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def tensor(self, pointer: int, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8 over memory that is allocated or opened here; it must not outlive that.

        The device is said, not asked for as `__cuda_array_interface__` would have it: memory of a peer's card, which
        this process does not see, has none that torch could name. This card's kernels and copies reach it anyhow.
        """
        try:
            storage = torch._C._construct_storage_from_data_pointer(pointer, self._torch_device, num_bytes)
            return torch.empty(0, dtype=torch.uint8, device=self._torch_device).set_(storage)
        except RuntimeError as error:
            raise CudaError(f"torch cannot look at the memory: {error}") from error

    def empty(self, num_bytes: int) -> Tensor:
        """Memory that may be written from any stream at once.

        It is allocated for the copies' stream: what torch hands out for the compute stream is free only behind the
        steps that have been launched there, which copies do not wait for.
        """
        try:
            with torch.cuda.stream(self._stream):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._torch_device)
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            raise CudaError(str(error).splitlines()[0]) from error

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Done when it returns; on a stream of its own, so that it does not wait for forward passes."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def pin(self, address: int, num_bytes: int) -> None:
        """Lock host memory for copies to and from the card, until `unpin`."""
        with self._in_context():
            flags = ctypes.c_uint(0)
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), flags)

    def unpin(self, address: int) -> None:
        with self._in_context():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name} failed with {(text.value or b'error ' + str(code).encode()).decode()}")


@cache
def cuda_device() -> CudaDevice:
    """This worker's card. Raises CudaError where there is no driver."""
    return CudaDevice()
