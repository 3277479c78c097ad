"""What the launcher must know of a model without loading it: its shape, its weight in bytes, its digest."""

import hashlib
from pathlib import Path

import msgspec

from ..core.errors import ConfigurationError
from ..vocab.model_config import load_model_config
from ..vocab.model_folder import weight_files

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096
_ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


class ModelFacts(msgspec.Struct, frozen=True):
    """`num_parameters` counts what the weight files hold (a tied head once)."""

    name: str
    folder: str
    note: str  # shown at start: how the weights were made, "" for files used as they are
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    num_parameters: int
    files_digest: str

    def digest(self, dtype: str) -> str:
        """Equal for two workers exactly when they compute the same function: weights, dtype and tokenizer."""
        return hashlib.sha256(f"{self.files_digest}:{dtype}".encode()).hexdigest()[:32]


def read_model_facts(name: str, folder: Path, note: str) -> ModelFacts:
    """Read config.json and the headers of the weight files. Raises ConfigurationError for what is not a model."""
    config = load_model_config(folder)
    paths = [folder / name for name in weight_files(folder)]
    return ModelFacts(
        name=name,
        folder=str(folder),
        note=note,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        num_parameters=sum(_num_parameters(path) for path in paths),
        files_digest=_files_digest(folder, paths),
    )


def _header(path: Path) -> bytes:
    """The JSON header of a safetensors file: an 8-byte little-endian length, then the text."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ConfigurationError(f"{path} is cut short or not a safetensors file. Fetch it again.")
        return file.read(length)


def _num_parameters(path: Path) -> int:
    try:
        header = msgspec.json.decode(_header(path), type=dict[str, dict[str, object]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} has no readable header ({error}). Fetch it again.") from error
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = msgspec.convert(tensor["data_offsets"], tuple[int, int])
        total += (end - begin) // _ITEM_SIZES.get(str(tensor["dtype"]), 4)
    return total


def _files_digest(folder: Path, paths: list[Path]) -> str:
    """SHA-256 over sizes, headers and samples of the weight files, and over config and tokenizer.

    Hashing all bytes would cost a second a gigabyte at each start. The samples lie all over a file, for a fine-tuned
    model may differ from its base in the middle layers only.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little") + _header(path))
        with path.open("rb") as file:
            for part in range(_NUM_SAMPLES + 1):  # the last one ends with the file
                file.seek(max(0, size - _SAMPLE_BYTES) * part // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    for name in ("config.json", "tokenizer.json"):
        path = folder / name
        if path.exists():
            digest.update(path.read_bytes())
    return digest.hexdigest()
