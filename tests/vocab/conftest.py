"""Builders of tiny models: a byte-level tokenizer, a byte_fallback one, a two-layer GGUF file. No downloads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 32, 4, 2, 8, 64, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("Ã", "©"), ("1", "2")]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"


def byte_level_vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return SPECIALS + alphabet + [left + right for left, right in MERGES]


def byte_level_tokenizer() -> Tokenizer:
    """What the GGUF below holds, built by hand; plus the id of a token that is added and not special."""
    vocabulary = {token: i for i, token in enumerate(byte_level_vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def byte_fallback_tokenizer(strip: bool) -> Tokenizer:
    """A vocabulary of the Llama 2 kind: words with a space mark, and a token for each byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "▁b", "▁▁", "é", "日", "本", "a▁b"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def permute_as_llama_cpp(weights: np.ndarray, n_head: int) -> np.ndarray:
    """The published formula of llama.cpp's converter (convert_hf_to_gguf.py, LlamaModel.permute)."""
    halves = weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def llama_weights(tied: bool) -> dict[str, np.ndarray]:
    """Hugging Face name |-> float32 values of a random two-layer Llama, all of them exact in float16."""
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.standard_normal((rows, columns)).astype(np.float16).astype(np.float32)

    vocab = len(byte_level_vocabulary())
    weights = {"model.embed_tokens.weight": matrix(vocab, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = random.random(HIDDEN, dtype=np.float32)
        weights[prefix + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        weights[prefix + "post_attention_layernorm.weight"] = random.random(HIDDEN, dtype=np.float32)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(FEED_FORWARD, HIDDEN)
        weights[prefix + "mlp.up_proj.weight"] = matrix(FEED_FORWARD, HIDDEN)
        weights[prefix + "mlp.down_proj.weight"] = matrix(HIDDEN, FEED_FORWARD)
    weights["model.norm.weight"] = random.random(HIDDEN, dtype=np.float32)
    if not tied:
        weights["lm_head.weight"] = matrix(vocab, HIDDEN)
    return weights


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF file as llama.cpp would write it; `metadata` adds or replaces keys (None leaves one out)."""
    writer = gguf.GGUFWriter(path, architecture)
    tokens = byte_level_vocabulary()
    types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))
    values: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | (metadata or {})
    for key, value in values.items():
        match value:
            case None:
                continue
            case list():
                writer.add_array(key, value)
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = permute_as_llama_cpp(tensor, HEADS if "q_proj" in name else KV_HEADS)
        stored = tensor if tensor.ndim == 1 else gguf.quants.quantize(tensor, matrix_type)
        raw_type = None if tensor.ndim == 1 else matrix_type
        writer.add_tensor(gguf_name(name), stored, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """make_gguf(tied=True, name="tiny.gguf", weights=..., **options of write_gguf) -> path of a GGUF file."""

    def make(tied: bool = True, name: str = "tiny.gguf", **options: Any) -> Path:
        weights = options.pop("weights", None) or llama_weights(tied)
        return write_gguf(tmp_path / name, weights, **options)

    return make


@pytest.fixture
def make_weights() -> Callable[[bool], dict[str, np.ndarray]]:
    return llama_weights


@pytest.fixture
def permute() -> Callable[[np.ndarray, int], np.ndarray]:
    return permute_as_llama_cpp


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def make_byte_fallback() -> Callable[[bool], Tokenizer]:
    return byte_fallback_tokenizer


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder in which everything but the content of the weights is real."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


class RecordingProgress:
    """Keeps every phase as [description, total, sum of advances]."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []

    def phase(self, description: str, total: int | None = None) -> "RecordingPhase":
        self.phases.append([description, total, 0])
        return RecordingPhase(self.phases[-1])


class RecordingPhase:
    def __init__(self, record: list[Any]) -> None:
        self._record = record

    def __enter__(self) -> Callable[[int], None]:
        return self._advance

    def __exit__(self, *exception: object) -> None:
        return None

    def _advance(self, amount: int) -> None:
        self._record[2] += amount


@pytest.fixture
def progress() -> RecordingProgress:
    return RecordingProgress()
