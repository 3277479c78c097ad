import subprocess
import sys

MODULES = (
    "chat_template, config_reader, conversion_cache, converted_model, detokenizer, gguf_architectures, gguf_config, "
    "gguf_convert, gguf_file, gguf_sentencepiece, gguf_tokenizer, hub, "
    "model_config, model_folder, packaged_model, progress, rope_config, safetensors_stream, source, stop, tokenizer, "
    "window_config"
)


def loaded(names: str, statement: str) -> set[str]:
    """Which of `names` a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*(set({names.split()!r}) & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_no_module_of_the_room_brings_torch() -> None:
    assert loaded("torch transformers", f"from baton.vocab import {MODULES}") == set()


def test_finding_a_model_costs_no_slow_import() -> None:
    slow = "torch gguf numpy pip rich huggingface_hub tokenizers jinja2"
    assert loaded(slow, "from baton.vocab.source import resolve_model") == set()
