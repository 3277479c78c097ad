"""Wire messages: every one survives the wire as the same type, and nothing else gets in."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Envelope, Message, NodeRef
from baton.core.request import Request, SamplingParams
from baton.core.timeline import Timeline

MESSAGE_TYPES = Message.__args__
encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Envelope)


# msgpack integers are 64-bit; ids, counts and checksums all are. NaN would not equal itself.
st.register_type_strategy(int, st.integers(0, 2**64 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))


def every_field(struct: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Instances with no field left at its default (hypothesis does not know msgspec's default factories)."""
    hints = typing.get_type_hints(struct)
    return st.builds(struct, **{name: st.from_type(hints[name]) for name in struct.__struct_fields__})


for struct in (*MESSAGE_TYPES, Timeline, Request, SamplingParams):
    st.register_type_strategy(struct, every_field)


@given(st.data())
def test_every_message_survives_the_wire(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(MESSAGE_TYPES).flatmap(st.from_type))
    envelope = Envelope(NodeRef("decode-0", 7), 3, body)
    decoded = decoder.decode(encoder.encode(envelope))
    assert decoded == envelope
    assert type(decoded.body) is type(body)


@given(st.binary(max_size=200))
def test_random_bytes_do_not_decode(frame: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        decoder.decode(frame)


def test_an_unknown_tag_does_not_decode() -> None:
    frame = msgspec.msgpack.encode([["decode-0", 7], 3, ["RunThisCode", "import os"]])
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(frame)
