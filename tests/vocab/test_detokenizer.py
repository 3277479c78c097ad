from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from baton.vocab.detokenizer import Detokenizer
from baton.vocab.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="session")
def vocabularies(
    byte_level: tokenizers.Tokenizer, make_byte_fallback: Callable[[bool], tokenizers.Tokenizer]
) -> dict[str, Tokenizer]:
    with_odd_tokens = tokenizers.Tokenizer.from_str(byte_level.to_str())
    with_odd_tokens.add_tokens([AddedToken(text, normalized=False) for text in ("日本", "é é", "\ufffdx")])
    rust = {
        "byte_level": with_odd_tokens,
        "byte_fallback": make_byte_fallback(False),
        "byte_fallback, space stripped": make_byte_fallback(True),
    }
    return {name: Tokenizer(t.to_str().encode(), None) for name, t in rust.items()}


def joined(tokenizer: Tokenizer, chunks: list[list[int]], skip_special_tokens: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return "".join(map(detokenizer.push, chunks)) + detokenizer.finish()


KINDS = ["byte_level", "byte_fallback", "byte_fallback, space stripped"]
# ids beyond every vocabulary too: the logits of a model may be wider than its tokenizer
chunked_ids = st.lists(st.lists(st.integers(0, 290), max_size=5), max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(chunks=chunked_ids, skip=st.booleans())
def test_joined_pieces_equal_decode_of_all_ids(
    vocabularies: dict[str, Tokenizer], kind: str, chunks: list[list[int]], skip: bool
) -> None:
    tokenizer = vocabularies[kind]
    whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
    assert joined(tokenizer, chunks, skip) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("ab é日本🎉\u0301\ufffd"), max_size=20), data=st.data())
def test_valid_text_survives_any_cuts_and_no_character_is_split(
    vocabularies: dict[str, Tokenizer], kind: str, text: str, data: st.DataObject
) -> None:
    tokenizer = vocabularies[kind]
    if kind == "byte_level":
        ids = tokenizer.encode(text)
    else:  # spelled in byte tokens, after a word so that no leading space is stripped
        text = "a" + text
        ids = [_token_id(tokenizer, b"a"), *(3 + byte for byte in text[1:].encode())]
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        shown += detokenizer.push(ids[:size])
        ids = ids[size:]
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def _token_id(tokenizer: Tokenizer, data: bytes) -> int:
    return next(i for i in range(260, 290) if tokenizer.token_bytes(i) == data)


def test_every_split_of_cjk_and_emoji(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["byte_level"]
    text = "日本🎉é"
    ids = [byte_id(tokenizer, byte) for byte in text.encode()]
    for cut in range(len(ids) + 1):
        assert joined(tokenizer, [ids[:cut], ids[cut:]]) == text
    assert joined(tokenizer, [[i] for i in ids]) == text


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(3, 259) if tokenizer.token_bytes(i) == bytes([byte]))


def test_a_character_comes_with_its_last_byte(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([byte_id(tokenizer, byte)]) for byte in "a🎉b".encode()]
    assert pieces == ["a", "", "", "", "🎉", "b"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_at_the_end_is_one_replacement(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([byte_id(tokenizer, byte) for byte in b"a\xf0\x9f\x8e"]) == "a"
    assert detokenizer.finish() == REPLACEMENT


def test_a_run_of_byte_tokens_is_valid_as_a_whole_or_not_at_all(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["byte_fallback"]
    word = _token_id(tokenizer, b"a")
    valid = [3 + byte for byte in "é".encode()]
    assert joined(tokenizer, [valid, [word]]) == "éa"
    assert joined(tokenizer, [valid, [3 + 0xFF], [word]]) == REPLACEMENT * 3 + "a"


def test_special_tokens_are_skipped_or_shown(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["byte_level"]
    ids = [1, byte_id(tokenizer, ord("x")), 2]
    assert joined(tokenizer, [ids]) == "x"
    assert joined(tokenizer, [ids], skip_special_tokens=False) == "<|im_start|>x<|im_end|>"
