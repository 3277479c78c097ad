"""What makes a folder a complete model: config.json, tokenizer.json and safetensors, whole or in shards."""

from pathlib import Path

from ..core.errors import ConfigurationError
from .json_file import read_json_object

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"


def check_model_folder(folder: Path) -> None:
    """Raise ConfigurationError naming the first thing that a model folder lacks."""
    for required in ("config.json", "tokenizer.json"):
        if not (folder / required).is_file():
            raise ConfigurationError(
                f"The model folder {folder} has no {required}. "
                "Give a folder as Hugging Face publishes them (config.json, tokenizer.json, *.safetensors)."
            )
    for name in weight_files(folder):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"The model folder {folder} lacks {name}, which its {INDEX_NAME} names. Download it again."
            )


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights: the shards that the index names, else the one file.

    Other safetensors in the folder (some publishers add their own format) are no part of the model. Raises
    ConfigurationError when there are no weights that Baton reads, or the index is damaged.
    """
    if (folder / INDEX_NAME).is_file():
        return _shards(folder)
    if (folder / WEIGHTS_NAME).is_file():
        return [WEIGHTS_NAME]
    raise ConfigurationError(
        f"The model folder {folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}. Other weight files "
        "(.bin, .pt) are never read, because loading them can run code: convert them to safetensors."
    )


def _shards(folder: Path) -> list[str]:
    """The files that the index of a sharded model names; each is a plain name inside the folder."""
    weight_map = read_json_object(folder / INDEX_NAME).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ConfigurationError(
            f"{folder / INDEX_NAME} does not map tensors to files of its folder. Download it again."
        )
    return sorted(set(names))
