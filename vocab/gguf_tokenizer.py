"""tokenizer.json and tokenizer_config.json from the vocabulary inside a GGUF file.

Two kinds: byte-level BPE ("gpt2" in GGUF) with a pre-tokenizer known here, and SentencePiece's BPE ("llama"). Another
split of the text into words would give other token ids than the model was trained on, and nobody would notice.
"""

from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..core.errors import ConfigurationError
from .gguf_sentencepiece import sentencepiece_model

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_SPACE_MARK = "▁"


class TokenType(IntEnum):
    """Kinds of GGUF vocabulary entries (`tokenizer.ggml.token_type`) that are not plain pieces of text."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(metadata: dict[str, Any]) -> str:
    """The text of tokenizer.json. `metadata` holds the `tokenizer.ggml.*` values without that prefix."""
    tokens: list[str] = metadata.get("tokens", [])
    match metadata.get("model"):
        case "gpt2":
            tokenizer = _byte_level(metadata, tokens)
        case "llama":
            tokenizer = _sentencepiece(metadata, tokens)
        case kind:
            raise ConfigurationError(
                f"This GGUF file has a tokenizer of kind {kind!r}; converted are 'gpt2' (byte-level BPE) and 'llama' "
                "(SentencePiece BPE). Use the model's Hugging Face folder with tokenizer.json instead."
            )
    _add_tokens(tokenizer, metadata, tokens)
    return tokenizer.to_str(pretty=False)


def build_tokenizer_config(metadata: dict[str, Any], chat_template: str | None, context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by their text, and the chat template."""
    tokens: list[str] = metadata["tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
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
    if metadata.get("pre") == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    template = _special_token_template(metadata, tokens)
    byte_level = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([byte_level, template]) if template else byte_level
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it: spaces become marks, unknown characters bytes."""
    unknown_id = metadata.get("unknown_token_id", 0)
    tokenizer = Tokenizer(sentencepiece_model(tokens, metadata.get("scores"), tokens[unknown_id]))
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    marks: normalizers.Normalizer = normalizers.Replace(" ", _SPACE_MARK)
    if metadata.get("add_space_prefix", True):
        marks = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), marks])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(steps)
    template = _special_token_template(metadata, tokens)
    if template:
        tokenizer.post_processor = template
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Tokens that are found in the text before it is split: special ones, and those the vocabulary's makers defined."""
    by_type = list(zip(tokens, metadata.get("token_type", []), strict=False))
    # In SentencePiece the unknown token is special too; in a byte-level vocabulary nothing is unknown.
    special = (TokenType.CONTROL, TokenType.UNKNOWN) if metadata["model"] == "llama" else (TokenType.CONTROL,)
    control = [token for token, kind in by_type if kind in special]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    defined = [token for token, kind in by_type if kind == TokenType.USER_DEFINED]
    marked = [token for token in defined if _SPACE_MARK in token and metadata["model"] == "llama"]
    if marked and metadata.get("add_space_prefix", True):
        raise ConfigurationError(
            f"The vocabulary of this GGUF file defines the token {marked[0]!r}, with spaces, and puts a space before "
            "every text. Use the model's Hugging Face folder with tokenizer.json instead."
        )
    # Marks stand where spaces were once the text is normalised.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=token in marked) for token in defined])


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(name: str | None) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """The pre-tokenizer GGUF calls `name`, and whether whole words in the vocabulary skip the merges."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match name:
        case "gpt-2":
            return byte_level, False
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, byte_level]), False
        case "llama-bpe" | "qwen2":
            words = _LLAMA3_WORDS if name == "llama-bpe" else _QWEN2_WORDS
            split = pre_tokenizers.Split(Regex(words), behavior="isolated")
            return pre_tokenizers.Sequence([split, plain]), name == "llama-bpe"
    raise ConfigurationError(
        f"This GGUF file asks for the pre-tokenizer {name!r}; known are gpt-2, smollm, llama-bpe and qwen2. "
        "Use the model's Hugging Face folder with tokenizer.json instead."
    )


def _adds_bos(metadata: dict[str, Any]) -> bool:
    """What absent means is llama.cpp's choice."""
    return bool(metadata.get("add_bos_token", metadata.get("model") == "llama"))


def _special_token_template(metadata: dict[str, Any], tokens: list[str]) -> processors.PostProcessor | None:
    before = ["bos"] if _adds_bos(metadata) else []
    after = ["eos"] if metadata.get("add_eos_token", False) else []
    if not before + after:
        return None
    ids = {name: metadata[f"{name}_token_id"] for name in before + after}
    single = [tokens[ids[name]] for name in before] + ["$A"] + [tokens[ids[name]] for name in after]
    special = [(tokens[token_id], token_id) for token_id in dict.fromkeys(ids.values())]
    return processors.TemplateProcessing(single=single, special_tokens=special)
