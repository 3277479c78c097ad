"""SentencePiece's BPE from the pieces and scores in a GGUF file, as merges of a tokenizer.json.

SentencePiece joins, again and again, the two neighbours whose joint piece has the highest score (Kudo and Richardson,
2018). A tokenizer.json lists pairs, the first to be joined first: so every way to cut a piece into two known ones is a
merge, in the order of the pieces' scores.
"""

import re

from tokenizers import models

from ..core.errors import ConfigurationError

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def sentencepiece_model(tokens: list[str], scores: list[float] | None, unknown: str) -> models.BPE:
    """Raises ConfigurationError for a vocabulary without scores or bytes, or with a token twice."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if scores is None or len(scores) != len(tokens):
        what = "lacks the scores of its tokens"
    elif len(vocabulary) < len(tokens):
        what = "has a token twice"
    elif not vocabulary.keys() >= _BYTE_TOKENS:
        what = "lacks tokens for bytes"
    else:
        merges = _merges(vocabulary, scores)
        return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    raise ConfigurationError(f"The SentencePiece vocabulary of this GGUF file {what}. Use another file of this model.")


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Best score first; the cuts of one piece, or of pieces with equal scores, by their parts' ids."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocabulary.items():
        if _BYTE_TOKEN.fullmatch(piece):
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(ranked)]
