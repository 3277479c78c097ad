import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from baton.core.errors import ConfigurationError
from baton.vocab import converted_model, gguf_convert, gguf_file, hub
from baton.vocab.model_config import load_model_config
from baton.vocab.source import resolve_model


def test_a_folder_is_used_as_it_is(model_folder: Path, tmp_path: Path, progress: Any) -> None:
    source = resolve_model(str(model_folder), tmp_path / "cache", progress)
    assert (source.name, source.folder, source.quantisation_note) == ("tiny-model", model_folder, "")
    assert not (tmp_path / "cache").exists()
    assert progress.phases == []


def test_a_sharded_folder(model_folder: Path, tmp_path: Path, progress: Any) -> None:
    (model_folder / "model.safetensors").unlink()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_folder / shards[0]).write_bytes(b"")
    with pytest.raises(ConfigurationError, match=f"lacks {shards[1]}"):
        resolve_model(str(model_folder), tmp_path, progress)
    (model_folder / shards[1]).write_bytes(b"")
    assert resolve_model(str(model_folder), tmp_path, progress).folder == model_folder


@pytest.mark.parametrize("weight_map", [{"a": "../other/model.safetensors"}, {"a": 3}, {}, None, []])
def test_an_index_may_name_only_files_of_its_folder(
    model_folder: Path, tmp_path: Path, progress: Any, weight_map: object
) -> None:
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigurationError, match="does not map tensors to files of its folder"):
        resolve_model(str(model_folder), tmp_path, progress)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(model_folder: Path, tmp_path: Path, progress: Any, missing: str) -> None:
    (model_folder / missing).unlink()
    (model_folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=f"has (no|neither) {missing}"):
        resolve_model(str(model_folder), tmp_path, progress)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The GGUF files that were really converted."""
    converted: list[Path] = []
    original = gguf_convert.convert_gguf

    def convert(source: Path, target: Path, progress: Any) -> str:
        converted.append(source)
        return original(source, target, progress)

    monkeypatch.setattr(gguf_convert, "convert_gguf", convert)
    return converted


def test_a_gguf_file_is_converted_once(
    make_gguf: Callable[..., Path], tmp_path: Path, progress: Any, conversions: list[Path]
) -> None:
    path, cache = make_gguf(), tmp_path / "cache"
    first = resolve_model(str(path), cache, progress)
    progress.phases.clear()
    assert resolve_model(str(path), cache, progress) == first
    assert progress.phases == []  # neither hashed nor converted again
    copy = path.with_name("copy").with_suffix(".gguf")
    copy.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))
    assert resolve_model(str(path), cache, progress) == first  # touched, but of the same content
    assert conversions == [path]
    assert first.name == "tiny"
    assert load_model_config(first.folder).num_layers == 2
    assert sorted(p.name for p in first.folder.iterdir()) == [
        "baton_source.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_changed_gguf_file_is_another_model(
    make_gguf: Callable[..., Path], tmp_path: Path, progress: Any, conversions: list[Path]
) -> None:
    first = resolve_model(str(make_gguf()), tmp_path / "cache", progress)
    second = resolve_model(str(make_gguf(tied=False)), tmp_path / "cache", progress)
    assert first.folder != second.folder
    assert not load_model_config(second.folder).tie_word_embeddings
    assert len(conversions) == 2


def test_a_broken_gguf_file_leaves_nothing(tmp_path: Path, progress: Any) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigurationError, match="not a complete GGUF file"):
        resolve_model(str(path), tmp_path / "cache", progress)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_without_the_gguf_package_the_error_says_how_to_get_it(
    tmp_path: Path, progress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'baton-serve\[gguf\]'"):
        resolve_model(None, tmp_path, progress)
    assert progress.phases == []  # said before the download


@pytest.mark.parametrize("alias", [None, "smollm2", "SmolLM2", "SmolLM2-135M-Instruct"])
def test_names_of_the_default_model(
    alias: str | None, tmp_path: Path, progress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = converted_model.packaged_model.GGUF_SHA256
    folder = tmp_path / "models" / f"SmolLM2-135M-Instruct-{digest[:16]}-v1"
    folder.mkdir(parents=True)
    (folder / "baton_source.json").write_text('{"quantisation_note": "weights dequantised from Q4_1"}')
    source = resolve_model(alias, tmp_path, progress)
    assert (source.name, source.folder) == ("SmolLM2-135M-Instruct", folder)
    assert source.quantisation_note == "weights dequantised from Q4_1"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2", "Did you mean smollm2?"),
        ("SmolLM2-135M-Instrct", "Did you mean smollm2?"),
        ("{folder}/tiny-modl", "Did you mean {folder}/tiny-model?"),
        ("meta-llama/Llama-3.2-1B", "Did you mean hf:meta-llama/Llama-3.2-1B"),
        ("/nowhere/at/all", "There is no model '/nowhere/at/all'. Accepted are"),
        ("", "There is no model ''"),
        ("a\0b", "There is no model"),
        ("x" * 5000, "There is no model"),
        ("~nobody-of-that-name/model", "There is no model"),
        ("{folder}/tiny-model/config.json", "is a file, but no .gguf file"),
    ],
)
def test_anything_else_gets_a_hint_and_the_list(
    model_folder: Path, tmp_path: Path, progress: Any, name: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_model(name.format(folder=tmp_path), tmp_path / "cache", progress)
    assert hint.format(folder=tmp_path) in str(caught.value)
    assert "a .gguf file, or hf:org/name" in str(caught.value)


class FakeHub:
    """Stands in for snapshot_download: what is in the local cache, and what the network answers."""

    def __init__(self, local: Path | None, remote: Path | Exception) -> None:
        self.local, self.remote = local, remote
        self.downloads: list[list[str]] = []

    def __call__(self, repository: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        if local_files_only:
            if self.local is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.local)
        self.downloads.append(allow_patterns)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    def make(local: Path | None, remote: Path | Exception) -> FakeHub:
        fake = FakeHub(local, remote)
        monkeypatch.setattr(hub, "snapshot_download", fake)
        return fake

    return make


def test_a_hub_model_is_downloaded_without_files_that_can_run_code(
    fake_hub: Callable[..., FakeHub], model_folder: Path, tmp_path: Path, progress: Any
) -> None:
    fake = fake_hub(None, model_folder)
    source = resolve_model("hf:org/name", tmp_path, progress)
    assert (source.name, source.folder) == ("org/name", model_folder)
    assert progress.phases == [["Downloading org/name from the Hugging Face Hub", None, 0]]
    (patterns,) = fake.downloads
    assert "model-*.safetensors" in patterns
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)


def test_a_complete_copy_needs_no_network(
    fake_hub: Callable[..., FakeHub], model_folder: Path, tmp_path: Path, progress: Any
) -> None:
    fake = fake_hub(model_folder, AssertionError("no network in this test"))
    assert resolve_model("hf:org/name", tmp_path, progress).folder == model_folder
    assert (fake.downloads, progress.phases) == ([], [])


def test_an_interrupted_download_goes_on(
    fake_hub: Callable[..., FakeHub], model_folder: Path, tmp_path: Path, progress: Any
) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    fake = fake_hub(partial, model_folder)
    assert resolve_model("hf:org/name", tmp_path, progress).folder == model_folder
    assert len(fake.downloads) == 1


def answer(status: int) -> Any:
    """The part of an HTTP response that the Hub's errors look at."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "what", "step"),
    [
        (GatedRepoError("403", response=answer(403)), "is gated", "https://huggingface.co/org/name"),
        (RepositoryNotFoundError("404", response=answer(404)), "There is no model org/name", "HF_TOKEN"),
        (LocalEntryNotFoundError("offline"), "cannot be reached", "HF_HUB_OFFLINE"),
        (OSError("disk trouble"), "failed: disk trouble", "Try again"),
        (TimeoutError(), "failed: TimeoutError", "Try again"),
    ],
)
def test_hub_errors_say_what_to_do(
    fake_hub: Callable[..., FakeHub], tmp_path: Path, progress: Any, error: Exception, what: str, step: str
) -> None:
    fake_hub(None, error)
    with pytest.raises(ConfigurationError) as caught:
        resolve_model("hf:org/name", tmp_path, progress)
    text = str(caught.value)
    assert what in text
    assert step in text
    assert len(text.splitlines()) in (2, 3)


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:../x"])
def test_impossible_hub_names_are_refused_without_asking(name: str, tmp_path: Path, progress: Any) -> None:
    with pytest.raises(ConfigurationError, match="Write hf:org/name"):
        resolve_model(name, tmp_path, progress)
