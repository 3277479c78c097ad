"""Loading takes little more memory than what is kept: files are mapped, and what was packed is given back."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

pytestmark = pytest.mark.slow

# FBGEMM fills rows up to a multiple of 512, which is no matter of loading.
VOCAB, HIDDEN, MIDDLE, LAYERS, HEADS = 16000, 512, 1536, 30, 8
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 8}

# Prints the peak and what stays, both beyond what the process had before. Not by getrusage: its peak survives exec.
CHILD = """
import sys, torch
from pathlib import Path
from baton.kernels.cpu import CpuKernels
from baton.models.registry import load_model
from baton.vocab.model_config import load_model_config

def memory(field):
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024

folder = Path(sys.argv[1])
torch.set_num_threads(1)
torch.ops.quantized.linear_prepack_fp16(torch.zeros(8, 8), None)  # loads what packing needs once
config = load_model_config(folder)
before = memory('VmRSS')
model = load_model(config, folder, CpuKernels(), sys.argv[2])
print(memory('VmHWM') - before, memory('VmRSS') - before)
"""


def write_model(folder: Path, changes: dict[str, object], dtype: type) -> int:
    """Returns the number of weights in matrices but the embedding."""
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.norm.weight": (HIDDEN,), "model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(int(config["num_hidden_layers"])):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        if "num_local_experts" in config:
            moe = f"{name}.block_sparse_moe"
            shapes[f"{moe}.gate.weight"] = (config["num_local_experts"], HIDDEN)
            for expert in range(config["num_local_experts"]):
                shapes |= {f"{moe}.experts.{expert}.{part}.weight": (MIDDLE, HIDDEN) for part in ("w1", "w3")}
                shapes[f"{moe}.experts.{expert}.w2.weight"] = (HIDDEN, MIDDLE)
        else:
            shapes |= {f"{name}.mlp.{part}_proj.weight": (MIDDLE, HIDDEN) for part in ("gate", "up")}
            shapes[f"{name}.mlp.down_proj.weight"] = (HIDDEN, MIDDLE)
    save_file({name: np.full(shape, 0.01, dtype) for name, shape in shapes.items()}, folder / "model.safetensors")
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    ("file_dtype", "dtype"), [(np.float16, "float16"), (np.float32, "float32"), (np.float16, "float32")]
)
def test_the_peak_is_hardly_more_than_what_is_kept(
    tmp_path: Path, changes: dict[str, object], file_dtype: type, dtype: str
) -> None:
    kept = write_model(tmp_path, changes, file_dtype) * (2 if dtype == "float16" else 4)
    assert kept > 150e6
    command = [sys.executable, "-P", "-c", CHILD, str(tmp_path), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, stays = map(int, result.stdout.split())
    print(f"peak {peak / kept:.3f}, afterwards {stays / kept:.3f} of the {kept / 1e6:.0f} MB kept")
    assert peak <= 1.1 * kept
