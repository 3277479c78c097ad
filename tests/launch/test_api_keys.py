"""--api-key: keys and files of keys; where the launcher and the clients use them."""

from pathlib import Path
from typing import Any

import pytest

from baton.core.credentials import api_key_headers
from baton.core.errors import ConfigurationError
from baton.gateway.keys import digest_of
from baton.launch.api_keys import read_api_keys
from baton.launch.cli import app
from baton.launch.options import HostPort
from baton.launch.start_table import curl_line


def test_keys_and_files_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  one  \ntwo\r\n#three\n")
    assert read_api_keys([]) == ()
    assert read_api_keys(["zero", f"@{path}", "two", "four"]) == ("zero", "one", "two", "four")


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n", b"two words\n", "schlüssel\n".encode(), b"\xff\xfe", b"x" * 513]
)
def test_files_without_keys(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="--api-key @") as caught:
        read_api_keys([f"@{path}"])
    assert "words" not in str(caught.value)


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "schlüssel", "x" * 513])
def test_what_is_no_key(value: str) -> None:
    with pytest.raises(ConfigurationError, match="--api-key: a key is") as caught:
        read_api_keys([value])
    assert value == "" or value not in str(caught.value)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_api_keys(["@/nowhere/keys"])


def test_the_flag_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("baton.launch.serve.serve", lambda *options: seen.append(options[3].api_key))
    app(["serve", "--api-key", "one", "--api-key=two"], result_action="return_value")
    app(["serve"], result_action="return_value")
    assert seen == [("one", "two"), ()]


def test_clients_take_the_key_of_the_environment() -> None:
    assert api_key_headers({}) == api_key_headers({"BATON_API_KEY": " "}) == {}
    assert api_key_headers({"OPENAI_API_KEY": "b"}) == {"Authorization": "Bearer b"}
    assert api_key_headers({"OPENAI_API_KEY": "b", "BATON_API_KEY": " a\n"}) == {"Authorization": "Bearer a"}


def test_configs_and_hints_hold_no_key() -> None:
    assert "secret" not in digest_of("secret")
    line = curl_line(HostPort("127.0.0.1", 8000), "m", needs_key=True)
    assert '-H "Authorization: Bearer $BATON_API_KEY"' in line
    assert "Authorization" not in curl_line(HostPort("127.0.0.1", 8000), "m")
