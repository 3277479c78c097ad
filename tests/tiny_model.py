"""A tiny random Llama or Qwen3 in a folder, written with numpy and safetensors: no torch, no transformers, no download.

Two layers, grouped-query attention, a byte-level tokenizer of 320 tokens whose specials are ChatML's. The weights
come from a fixed seed, so the folder is the same on every machine of one byte order.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 16
VOCAB_SIZE = 320
CONTEXT_LENGTH = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(folder: Path, seed: int = 0, family: str = "llama") -> Path:
    """Fill `folder` (made if absent) with config.json, model.safetensors and the tokenizer; return it.

    `family` is "llama" or "qwen3", which has norms of queries and keys and an output that is the embedding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(seed)
    config = _config()
    if family == "qwen3":
        generator = np.random.default_rng(seed + 1)
        for layer in range(NUM_LAYERS):
            for name in ("q_norm", "k_norm"):
                scale = generator.uniform(0.5, 1.5, HEAD_DIM).astype(np.float32)
                weights[f"model.layers.{layer}.self_attn.{name}.weight"] = scale
        weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    _write_json(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
    }


def _weights(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        # Variance-preserving, so that the output depends on the whole prompt and does not loop at once.
        return (generator.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": generator.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32),
        "model.norm.weight": np.ones(HIDDEN_SIZE, np.float32),
        "lm_head.weight": random(VOCAB_SIZE, HIDDEN_SIZE),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN_SIZE, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN_SIZE, np.float32),
            prefix + "self_attn.q_proj.weight": random(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.k_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.v_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            prefix + "self_attn.o_proj.weight": random(HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
            prefix + "mlp.gate_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            prefix + "mlp.up_proj.weight": random(INTERMEDIATE_SIZE, HIDDEN_SIZE),
            prefix + "mlp.down_proj.weight": random(HIDDEN_SIZE, INTERMEDIATE_SIZE),
        }
    return weights


def _tokenizer() -> Tokenizer:
    """All 256 bytes and a few English merges, so that a text has fewer tokens than bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    merges: list[tuple[str, str]] = []
    words = "Ġthe Ġof Ġand Ġis Ġin Ġwhat Ġcapital ing er on at it en es or Ġa Ġt Ġs Ġw Ġc Ġo Ġp Ġb Ġf"
    for word in words.split():
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if "".join(pair) not in vocab and len(vocab) < VOCAB_SIZE:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
    filler = 0
    while len(vocab) < VOCAB_SIZE:  # ids the model can produce must all decode
        vocab[f"<|unused_{filler}|>"] = len(vocab)
        filler += 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1))
