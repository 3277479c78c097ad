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
    if (folder / INDEX_NAME).is_file():
        for shard in sorted(shard_names(folder)):
            if not (folder / shard).is_file():
                raise ConfigurationError(
                    f"The model folder {folder} lacks {shard}, which its {INDEX_NAME} names. Download it again."
                )
    elif not (folder / WEIGHTS_NAME).is_file():
        raise ConfigurationError(
            f"The model folder {folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}. Other weight files "
            "(.bin, .pt) are never read, because loading them can run code: convert them to safetensors."
        )


def shard_names(folder: Path) -> set[str]:
    """The files that the index of a sharded model names; each is a plain name inside the folder."""
    weight_map = read_json_object(folder / INDEX_NAME).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ConfigurationError(
            f"{folder / INDEX_NAME} does not map tensors to files of its folder. Download it again."
        )
    return set(names)
