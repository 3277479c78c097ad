"""SentencePiece vocabularies: the ids are those of its algorithm, written down here as it is defined."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from baton.core.errors import ConfigurationError
from baton.vocab.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from baton.vocab.tokenizer import Decoding, Tokenizer

TEXT = "the cat sat on the mat and the hat, that is the thing; an aardvark ate aaaaaa and bananas  in  the   bath " * 3
FIRST_PIECE = 3 + 256


def trained_pieces(count: int) -> list[str]:
    """Characters, then joined pairs by how often they occur: SentencePiece's order of scores."""
    words = [list(word) for word in TEXT.replace(" ", "▁").replace("▁", " ▁").split(" ") if word]
    pieces = sorted({character for word in words for character in word})
    while len(pieces) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        left, right = max(sorted(pairs), key=lambda pair: pairs[pair])
        pieces.append(left + right)
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if word[i - 1 : i + 1] == [left, right]:
                    word[i - 1 : i + 1] = [left + right]
    return pieces


def metadata(**changes: Any) -> dict[str, Any]:
    pieces = trained_pieces(60)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<turn>"]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * FIRST_PIECE + [-float(i) for i in range(len(pieces))] + [-1000.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    } | changes
    return {key: value for key, value in values.items() if value is not None}


def by_definition(text: str, given: dict[str, Any]) -> list[int]:
    """Join the neighbours whose joint piece has the highest score, the leftmost of equals, until none is known."""
    score = {token: given["scores"][i] for i, token in enumerate(given["tokens"]) if i >= FIRST_PIECE}
    parts = list(text.replace(" ", "▁"))
    while known := [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]:
        _, at = min(known)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    ids = []
    for part in parts:
        unknown = [3 + byte for byte in part.encode()]
        ids += [given["tokens"].index(part)] if part in score else unknown
    return ids


def build(given: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_tokenizer(given).encode(), None)


def random_texts(count: int) -> list[str]:
    rng = random.Random(5)
    words = TEXT.split()
    return [
        "".join(rng.choice([rng.choice(words), rng.choice("ath nsb  é日\n\t!")]) for _ in range(rng.randrange(15)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_ids_are_those_of_the_definition(has_prefix: bool) -> None:
    given = metadata(add_space_prefix=has_prefix)
    tokenizer = build(given)
    assert tokenizer.decoding is Decoding.BYTE_FALLBACK
    assert tokenizer.strips_leading_space is has_prefix
    for text in (*random_texts(300), TEXT):
        expected = by_definition(" " * has_prefix + text, given) if text else []
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text


def test_special_tokens_and_defined_ones_are_found_in_the_text() -> None:
    given = metadata(add_space_prefix=False)
    ids = build(given).encode("the<turn>the</s>the")
    the = by_definition("the", given)
    turn = given["tokens"].index("<turn>")
    assert ids == [*the, turn, *the, 2, *the]
    tokenizer = build(given)
    assert [tokenizer.is_special(token) for token in (0, 1, 2, turn)] == [True, True, True, False]


def test_defined_tokens_of_spaces() -> None:
    given = metadata(add_space_prefix=False)
    given["tokens"][-1] = "▁▁▁"
    ids = build(given).encode("a   the")
    assert ids == [*by_definition("a", given), len(given["tokens"]) - 1, *by_definition("the", given)]
    with pytest.raises(ConfigurationError, match="defines the token '▁▁▁', with spaces"):
        build(given | {"add_space_prefix": True})


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({"add_bos_token": None}, [1], []),  # absent: llama.cpp adds it for this kind
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_tokens_around_a_text(changes: dict[str, Any], before: list[int], after: list[int]) -> None:
    given = metadata(**changes)
    tokenizer = build(given)
    plain = tokenizer.encode("the cat")
    assert tokenizer.encode("the cat", add_special_tokens=True) == [*before, *plain, *after]
    config = build_tokenizer_config(given, None, 100)
    assert config["add_bos_token"] is bool(before)
    assert (config["bos_token"], config["unk_token"]) == ("<s>", "<unk>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "lacks the scores"),
        ({"scores": [0.0]}, "lacks the scores"),
        ({"tokens": ["<unk>", "a", "a"], "scores": [0.0] * 3}, "has a token twice"),
        ({"tokens": ["<unk>", "a"], "scores": [0.0] * 2}, "lacks tokens for bytes"),
    ],
)
def test_a_vocabulary_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(metadata(**changes))
