"""tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF file.

Only byte-level BPE ("gpt2" in GGUF) with a pre-tokenizer known here: another split of the text into words would give
other token ids than the model was trained on, and nobody would notice.
"""

from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from ..core.errors import ConfigurationError

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """Kinds of GGUF vocabulary entries (`tokenizer.ggml.token_type`) that are not plain pieces of text."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(metadata: dict[str, Any]) -> str:
    """The text of tokenizer.json. `metadata` holds the `tokenizer.ggml.*` values without that prefix."""
    kind = metadata.get("model")
    if kind != "gpt2":
        raise ConfigurationError(
            f"This GGUF file has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) is converted. "
            "Use the model's Hugging Face folder with tokenizer.json instead."
        )
    tokens: list[str] = metadata["tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_split_merge(merge) for merge in metadata["merges"]]
    made = {piece for left, right in merges for piece in (left, right, left + right)}
    if len(vocabulary) < len(tokens) or not made <= vocabulary.keys():
        raise ConfigurationError(
            "The vocabulary of this GGUF file contradicts itself (a token twice, or a merge of unknown tokens). "
            "Use another file of this model."
        )
    pre_tokenizer, ignore_merges = _pre_tokenizer(metadata.get("pre"))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    by_type = list(zip(tokens, metadata.get("token_type", []), strict=False))
    control = [token for token, kind in by_type if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    defined = [token for token, kind in by_type if kind == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    tokenizer.post_processor = _post_processor(metadata, tokens)
    return tokenizer.to_str(pretty=False)


def build_tokenizer_config(metadata: dict[str, Any], chat_template: str | None, context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by their text, and the chat template."""
    tokens: list[str] = metadata["tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("add_bos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str | None) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """The pre-tokenizer GGUF calls `name`, and whether whole words in the vocabulary skip the merges."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return byte_level, False
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, byte_level]), False
        case "llama-bpe":
            words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
            plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([words, plain]), True
    raise ConfigurationError(
        f"This GGUF file asks for the pre-tokenizer {name!r}; known are gpt-2, smollm and llama-bpe. "
        "Use the model's Hugging Face folder with tokenizer.json instead."
    )


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> processors.PostProcessor:
    if not metadata.get("add_bos_token", False):
        return processors.ByteLevel(trim_offsets=True)
    bos_id = metadata["bos_token_id"]
    bos = tokens[bos_id]
    template = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
