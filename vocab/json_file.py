"""Reading the JSON files of a model folder with errors that a user can act on."""

from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import ConfigurationError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises ConfigurationError when it is missing, unreadable or no object."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"Cannot read {path}: {error.strerror}. "
            "Give a complete model folder (config.json, tokenizer.json, *.safetensors)."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not valid JSON ({error}). Download the file again.") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} holds no JSON object. Download the file again.")
    return value


def read_json_object_if_present(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but an absent file is an empty object."""
    return read_json_object(path) if path.exists() else {}
