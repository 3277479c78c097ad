"""Models from the Hugging Face Hub, through huggingface_hub and its own cache (HF_HOME, HF_TOKEN, HF_ENDPOINT)."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ..core.errors import ConfigurationError
from .model_folder import check_model_folder
from .progress import Progress

# Everything a model folder needs, nothing that can run code (.bin, .pt, .py), no copies for other programs.
PATTERNS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
]


def download_snapshot(repository: str, progress: Progress) -> Path:
    """The folder of `org/name` in the Hub's cache, downloaded when it is not complete there.

    A complete copy is used as it is, without asking the Hub: starts are quick, work offline and do not change the
    model under a running service. Raises ConfigurationError (not found, gated, offline, incomplete).
    """
    try:
        folder = Path(snapshot_download(repository, allow_patterns=PATTERNS, local_files_only=True))
        check_model_folder(folder)
        return folder
    except (LocalEntryNotFoundError, ConfigurationError):
        pass  # not there or not complete: download
    except HFValidationError as error:
        raise ConfigurationError(
            f"hf:{repository} is not the name of a model on the Hub. Write hf:org/name."
        ) from error
    with progress.phase(f"Downloading {repository} from the Hugging Face Hub"):
        folder = _download(repository)
    check_model_folder(folder)
    return folder


def _download(repository: str) -> Path:
    local = "or give the folder of a model on this machine instead."
    try:
        return Path(snapshot_download(repository, allow_patterns=PATTERNS))
    except GatedRepoError as error:
        raise ConfigurationError(
            f"The model {repository} is gated: its owner asks you to accept a licence first.\n"
            f"Accept it at https://huggingface.co/{repository}, then set HF_TOKEN to a token of your account,\n{local}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"There is no model {repository} on the Hugging Face Hub, or it is private.\n"
            f"Check the spelling, set HF_TOKEN if it is private, {local}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigurationError(
            f"The Hugging Face Hub cannot be reached, and {repository} is not in its local cache.\n"
            f"Check the network (and that HF_HUB_OFFLINE is not set), {local}"
        ) from error
    except Exception as error:  # the HTTP client below huggingface_hub, and so its errors, differ by version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(f"Downloading {repository} failed: {reason[:300]}\nTry again, {local}") from error
