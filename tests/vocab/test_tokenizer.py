import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from baton.core.errors import ConfigurationError, RequestError
from baton.vocab.tokenizer import Decoding, Tokenizer, check_text


@pytest.fixture(scope="session")
def tokenizer(byte_level: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_level.to_str().encode(), "<|im_end|>")


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world é")
    assert tokenizer.encode_batch(["hello world é", "", "hello"]) == [ids, [], [ids[0]]]
    assert len(ids) == 1 + 4 + 2  # hello; Ġwo r l d; Ġ and é, merged from two bytes
    assert tokenizer.decode(ids) == "hello world é"


def test_special_tokens_in_the_text_become_their_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"
    assert [tokenizer.is_special(i) for i in ids] == [True, False, True]


def test_facts(tokenizer: Tokenizer, byte_level: tokenizers.Tokenizer) -> None:
    assert tokenizer.vocab_size == 3 + 256 + 8
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decoding is Decoding.BYTE_LEVEL
    assert tokenizer.has_token("<|im_start|>")
    assert not tokenizer.has_token("<|im_sep|>")
    definition = byte_level.to_str()
    assert tokenizer.digest == Tokenizer(definition.encode(), None).digest
    assert tokenizer.digest != Tokenizer(definition.replace("<|endoftext|>", "<|end|>").encode(), None).digest


@given(text=st.text())
def test_joined_token_bytes_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_token_bytes_of_parts_of_characters(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("🎉")] == [b"\xf0", b"\x9f", b"\x8e", b"\x89"]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(1_000_000) == b""


def test_token_bytes_of_byte_fallback(make_byte_fallback: Callable[[bool], tokenizers.Tokenizer]) -> None:
    rust = make_byte_fallback(True)
    tokenizer = Tokenizer(rust.to_str().encode(), "</s>")
    assert tokenizer.decoding is Decoding.BYTE_FALLBACK
    assert tokenizer.token_bytes(rust.token_to_id("<0xE4>")) == b"\xe4"
    assert tokenizer.token_bytes(rust.token_to_id("▁a")) == b" a"
    assert tokenizer.token_bytes(rust.token_to_id("日")) == "日".encode()


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff ok", "é\ud83c"])
def test_lone_surrogates_are_the_requests_fault(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D") as caught:
        tokenizer.encode(text)
    assert (caught.value.status, caught.value.param) == (400, None)
    with pytest.raises(RequestError) as caught:
        check_text(text, param="messages")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("text", ["\0", "a\0b", "\U0001f389", "\u202e", "\ufffd"])
def test_other_odd_characters_are_text(tokenizer: Tokenizer, text: str) -> None:
    check_text(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_off(byte_level: tokenizers.Tokenizer) -> None:
    copy = tokenizers.Tokenizer.from_str(byte_level.to_str())
    copy.enable_truncation(2)
    copy.enable_padding(length=4)
    tokenizer = Tokenizer(copy.to_str().encode(), None)
    assert [len(ids) for ids in tokenizer.encode_batch(["abcdef", "a"])] == [6, 1]


def test_from_folder(model_folder: Path) -> None:
    assert Tokenizer.from_folder(model_folder).eos_token_ids == (2,)
    (model_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert Tokenizer.from_folder(model_folder).eos_token_ids == (0,)
    (model_folder / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(model_folder).eos_token_ids == ()
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: No such file"):
        Tokenizer.from_folder(model_folder)


@pytest.mark.parametrize("definition", [b"", b"{}", b"not json", b'{"model": 3}'])
def test_a_broken_file_is_named(definition: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(definition, None)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_other_ways_of_decoding_are_refused(decoder: decoders.Decoder | None) -> None:
    rust = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        rust.decoder = decoder
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json decodes with"):
        Tokenizer(rust.to_str().encode(), None)
