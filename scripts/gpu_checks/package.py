"""Makes the repository importable as `baton` without installing it, with stand-ins for wheels that are not there.

The card's machine has torch, triton and numpy; pyzmq and msgspec are added. What else the imported rooms want:

* xxhash checks bytes in transit. Its stand-in is blake2b, slower but as strict: both ends of a hand-over use the same.
* safetensors reads weights. Here it is replaced in any case: a "model" is a list of names and shapes, and each tensor
  is drawn on the device from a seed of its name, the same in every process, without 16 GB of files.
"""

import hashlib
import importlib.util
import json
import math
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
WEIGHTS_MAGIC = "random weights of scripts/gpu_check"


def make_importable(weights_device: str) -> None:
    """Register `baton` and the stand-ins in this process; random weights are made on `weights_device`."""
    for name in ("torch", "triton", "numpy", "zmq", "msgspec"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"gpu_check needs {name}: pip install {'pyzmq' if name == 'zmq' else name}")
    if importlib.util.find_spec("xxhash") is None:
        sys.modules["xxhash"] = _xxhash_stand_in()
    sys.modules["safetensors"] = _random_safetensors(weights_device)
    if "baton" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "baton", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["baton"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["baton"])


def has_stand_in() -> bool:
    """Whether checksums of host memory are the slower kind."""
    return hasattr(sys.modules.get("xxhash"), "IS_STAND_IN")


def _xxhash_stand_in() -> ModuleType:
    module: Any = ModuleType("xxhash")
    module.IS_STAND_IN = True
    module.xxh3_64_digest = lambda data, seed=0: hashlib.blake2b(data, digest_size=8).digest()
    module.xxh3_64_intdigest = lambda data, seed=0: int.from_bytes(module.xxh3_64_digest(data), "big")
    return module  # type: ignore[no-any-return]


def write_model(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A model folder for the stand-in of safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"magic": WEIGHTS_MAGIC, "dtype": config["torch_dtype"], "shapes": shapes}
    (folder / "model.safetensors").write_text(json.dumps(weights))
    return folder


def _random_safetensors(device: str) -> ModuleType:
    import torch

    class SafetensorError(Exception):
        pass

    class RandomWeights:
        def __init__(self, path: str | Path, framework: str = "pt", **_: object):
            content = json.loads(Path(path).read_text())
            if content.get("magic") != WEIGHTS_MAGIC:
                raise SafetensorError("not random weights")
            self._shapes, self._dtype = content["shapes"], getattr(torch, content["dtype"])

        def keys(self) -> list[str]:
            return list(self._shapes)

        def get_tensor(self, name: str) -> torch.Tensor:
            """Norm weights are 1; matrices keep the variance of what they multiply."""
            shape = self._shapes[name]
            if "norm" in name:
                return torch.ones(shape, device=device, dtype=self._dtype)
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            scale = 1.0 if "embed" in name else 1 / math.sqrt(shape[-1])
            return torch.randn(shape, generator=generator, device=device, dtype=self._dtype) * scale

    module: Any = ModuleType("safetensors")
    module.SafetensorError, module.safe_open = SafetensorError, RandomWeights
    return module  # type: ignore[no-any-return]


def model_files(folder: Path, name: str, *, is_tiny: bool) -> Path:
    """Write the model `name` (of the three shapes, or with `is_tiny` a small one of its family)."""
    from baton.kernels.gpu.model_shapes import MODEL_SHAPES, ModelShape

    shape = next(s for s in MODEL_SHAPES if s.name == name)
    if is_tiny:
        shape = ModelShape(name, 32, 64, 1, 2, 1, 16, 101, qk_norm=shape.qk_norm)
    config = {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 512 if is_tiny else 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "torch_dtype": "float32" if is_tiny else "bfloat16",
    }
    return write_model(folder, config, _tensor_shapes(shape))


def _tensor_shapes(shape: Any) -> dict[str, tuple[int, ...]]:
    """Under the names of Hugging Face."""
    hidden, width, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (width, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, width),
            prefix + "mlp.gate_proj.weight": (shape.intermediate_size, hidden),
            prefix + "mlp.up_proj.weight": (shape.intermediate_size, hidden),
            prefix + "mlp.down_proj.weight": (hidden, shape.intermediate_size),
        }
        if shape.qk_norm:
            shapes |= {f"{prefix}self_attn.{n}_norm.weight": (shape.head_dim,) for n in ("q", "k")}
    return shapes
