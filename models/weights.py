"""Weights from safetensors files, memory-mapped: opening costs milliseconds and processes share the page cache.

Only safetensors: `.bin` and `.pt` files are pickles, which run code when they are loaded.
"""

from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import ConfigurationError
from ..vocab.model_folder import weight_files
from .load_memory import drop_pages, mapped_ranges


class WeightReader:
    """Hands out each tensor of a model folder once, on `device`, checks its shape, and at the end names what was left.

    Use it as a context manager; tensors stay valid afterwards. Raises ConfigurationError for missing files, missing,
    misshapen or unexpected tensors.
    """

    def __init__(self, folder: Path, device: torch.device):
        self.device = device
        self._folder = folder
        self._file_of: dict[str, str] = {}  # tensor name |-> file name
        self._open: dict[str, safe_open] = {}
        self._mapped: dict[str, list[range]] = {}  # file name |-> addresses
        for file in weight_files(folder):
            self._open[file] = self._open_file(folder / file)
            self._mapped[file] = mapped_ranges(folder / file)
            names = self._open[file].keys()  # type: ignore[no-untyped-call] # safetensors is not annotated
            self._file_of.update(dict.fromkeys(names, file))
        self._left = set(self._file_of)
        self._touched: list[tuple[int, int]] = []  # address and bytes of tensors taken since the last release

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.clear()
        if error is None and self._left:
            raise ConfigurationError(
                f"{self._folder}: the weights hold tensors that this model does not use: {_some(self._left)}. "
                "Running without them would give wrong tokens; check that config.json belongs to these weights."
            )

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must have this shape, in the dtype of the file and on the reader's device."""
        if name not in self._file_of:
            raise ConfigurationError(
                f"{self._folder}: the weights lack the tensor {name}. The download may be incomplete, or config.json "
                "may belong to another model."
            )
        file = self._open[self._file_of[name]]
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._folder}: the tensor {name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(shape)}. Check that config.json belongs to these weights."
            )
        self._left.discard(name)
        if any(tensor.data_ptr() in mapped for mapped in self._mapped[self._file_of[name]]):
            self._touched.append((tensor.data_ptr(), tensor.nbytes))
        return tensor.to(self.device)  # on the CPU still the mapped file

    def take_stacked(self, shapes: dict[str, tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """Several matrices of one width, one below the other: name |-> shape. One at a time is held twice."""
        (width,) = {shape[1] for shape in shapes.values()}
        stacked = torch.empty((sum(rows for rows, _ in shapes.values()), width), dtype=dtype, device=self.device)
        first = 0
        for name, shape in shapes.items():
            stacked[first : first + shape[0]] = self.take(name, *shape)
            first += shape[0]
            self.release()
        return stacked

    def release(self) -> None:
        """Give back the memory of what was taken so far and has been copied; what is still mapped is read again.

        The system counts the pages of a mapped file as this process's until it needs them elsewhere.
        """
        for address, size in self._touched:
            drop_pages(address, size)
        self._touched.clear()

    def ignore(self, suffix: str) -> None:
        """Accept tensors whose name ends so without reading them."""
        self._left = {name for name in self._left if not name.endswith(suffix)}

    @staticmethod
    def _open_file(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}. Download the model again.") from error


def _some(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
