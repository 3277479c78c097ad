"""Where a model comes from: the default one, a folder, a .gguf file, or the Hugging Face Hub.

Whatever the source, what comes out is a folder with config.json, tokenizer.json and safetensors, all of it on disk:
every later part of Baton reads only that.
"""

import difflib
import os
from pathlib import Path

from ..core.errors import ConfigurationError
from . import packaged_model
from .conversion_cache import default_cache_dir
from .converted_model import ModelSource, default_model, gguf_model
from .model_folder import check_model_folder
from .progress import Progress

__all__ = ["ModelSource", "default_cache_dir", "resolve_model"]

HUB_PREFIX = "hf:"
_ACCEPTED = (
    f"Accepted are: nothing or {packaged_model.ALIASES[0]} (the default model), a folder with config.json, "
    f"tokenizer.json and safetensors, a .gguf file, or {HUB_PREFIX}org/name"
)


def resolve_model(name: str | None, cache: Path, progress: Progress) -> ModelSource:
    """Find, and the first time fetch and convert, the model that a user calls `name` (None: the default model).

    Raises ConfigurationError with the next step when there is no such model or it cannot be had.
    """
    if name is None or name.lower() in packaged_model.ALIASES:
        return default_model(cache, progress)
    if name.startswith(HUB_PREFIX):
        from .hub import download_snapshot  # brings an HTTP client that the other sources do not need

        repository = name.removeprefix(HUB_PREFIX)
        return ModelSource(repository, download_snapshot(repository, progress), "")
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # unlike Path.is_dir, these two have no objection to any name
        check_model_folder(path)
        return ModelSource(path.resolve().name, path.resolve(), "")
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        return gguf_model(path.resolve(), cache, progress)
    raise ConfigurationError(_unknown_model(name, path))


def _unknown_model(name: str, path: Path) -> str:
    if os.path.isfile(path):
        return f"{name} is a file, but no .gguf file. {_ACCEPTED}."
    return f"There is no model {name!r}. {_did_you_mean(name, path)}{_ACCEPTED}."


def _did_you_mean(name: str, path: Path) -> str:
    """A hint that ends in a space, or nothing."""
    if difflib.get_close_matches(name.lower(), packaged_model.ALIASES, n=1):
        return f"Did you mean {packaged_model.ALIASES[0]}? "
    neighbours = [entry.name for entry in path.parent.iterdir()] if os.path.isdir(path.parent) else []
    close = difflib.get_close_matches(path.name, neighbours, n=1)
    if close:
        return f"Did you mean {path.parent / close[0]}? "
    looks_like_hub = name.count("/") == 1 and not name.startswith(("/", ".", "~"))
    return f"Did you mean {HUB_PREFIX}{name} (from the Hugging Face Hub)? " if looks_like_hub else ""
