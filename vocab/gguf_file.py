"""GgufFile: metadata and tensors of a GGUF file. `gguf` is imported here and where tensors are dequantised only."""

import importlib.util
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigurationError


def require_gguf() -> None:
    """Raise ConfigurationError unless the optional package `gguf` is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigurationError(
            "Reading a GGUF file needs the package gguf. Install it with: pip install 'baton-serve[gguf]'"
        )


class GgufFile:
    """An open GGUF file: metadata by key, tensors by name. Raises ConfigurationError when it cannot be read."""

    def __init__(self, path: Path):
        require_gguf()
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ConfigurationError(
                f"{path} is not a complete GGUF file ({error}). Download or copy it again."
            ) from error
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.get("split.count", 1) > 1:
            raise ConfigurationError(
                f"{path} is one part of a split GGUF. Join the parts first: llama-gguf-split --merge."
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key: a number, a text or a list."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def metadata_below(self, prefix: str) -> dict[str, Any]:
        """All metadata whose key starts with `prefix`, keyed by the rest."""
        return {
            key.removeprefix(prefix): field.contents() for key, field in self._fields.items() if key.startswith(prefix)
        }

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigurationError(f"{self.path} lacks the metadata {key}. Use another file of this model.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """GGUF stores float32; its shortest decimal is the number that was meant (1e-05, not 9.9999997e-06)."""
        value = self.require(key) if default is None else self.get(key, default)
        return float(str(np.float32(value)))

    def require_only(self, key: str, *allowed: Any) -> None:
        """Refuse a value that is none of `allowed`; absent means the first one."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            self.refuse(f"{key} is {value!r}, supported is {' or '.join(map(repr, allowed))}")

    def refuse(self, what: str) -> NoReturn:
        raise ConfigurationError(f"{self.path}: {what}. Use the model's Hugging Face folder instead.")

    def values(self, name: str, expert: int | None = None) -> NDArray[np.float32]:
        """A tensor, or one expert's part of it, dequantised, in the order of its rows in memory."""
        from gguf.quants import dequantize

        source = self.tensors[name]
        data = source.data if expert is None else source.data[expert]
        shape = self.shape(name)
        try:
            values: NDArray[np.float32] = dequantize(data, source.tensor_type)
        except NotImplementedError as error:
            raise ConfigurationError(
                f"{self.path}: {name} is of type {source.tensor_type.name}, which cannot be "
                "dequantised. Use a file of another quantisation."
            ) from error
        return values.reshape(shape if expert is None else shape[1:])

    def shape(self, name: str) -> tuple[int, ...]:
        """As Hugging Face counts: the last dimension is that of neighbours in memory."""
        return tuple(int(n) for n in reversed(self.tensors[name].shape))
