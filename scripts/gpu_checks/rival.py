"""transformers on the same card with the same random weights, where it is installed: its tokens and its speed."""

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from baton.models.weights import WeightReader

from .decoding import Sequences
from .one_process import OneProcess
from .package import model_files
from .report import Report, Row


def goals(model: str) -> list[tuple[str, str]]:
    """None where transformers is not installed: that is said, and is no fault."""
    return [("rival", _label(model))] if importlib.util.find_spec("transformers") else []


def _label(model: str) -> str:
    return f"{model} beside transformers"


def beside_transformers(report: Report, one: OneProcess, model: str, *, is_tiny: bool) -> None:
    """Greedy tokens of both (bfloat16 rounds differently: a count, no verdict) and time a decode step at batch 1."""
    if importlib.util.find_spec("transformers") is None:
        report.add(Row("rival", "transformers", "not installed"))
        return
    prompt, num_tokens = list(range(1, 9 if is_tiny else 513)), 3 if is_tiny else 32
    with tempfile.TemporaryDirectory() as base:
        folder = model_files(Path(base) / "model", model, is_tiny=is_tiny)
        engine = one.load(folder, max_batch=1, tokens=4096)
        sequences = Sequences(engine, [len(prompt) + num_tokens + 1])
        first = sequences.prefill([prompt], 4096)
        tokens, times = sequences.decode(num_tokens - 1)
        own, own_step = [*first, *tokens[0]], statistics.median(times.wall)
        del engine, sequences
        one.free()
        theirs, their_step, version = _generate(folder, one.device, prompt, num_tokens)
    equal = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b), len(own))
    value = f"{equal} of {len(own)} tokens equal"
    speed = "not timed" if is_tiny else f"step {own_step * 1e3:.2f} ms, theirs {their_step * 1e3:.2f}"
    data: dict[str, object] = {"version": version}
    if not is_tiny:
        data |= {"own_step_s": own_step, "their_step_s": their_step}
    ok = equal == len(own) if is_tiny else equal > 0  # float32 is exact
    report.add(Row("rival", _label(model), value, f"{version}, {speed}", ok, data))


def _generate(folder: Path, device: torch.device, prompt: list[int], num_tokens: int) -> tuple[list[int], float, str]:
    sys.modules.pop("safetensors", None)  # the stand-in: transformers wants parts of the real one that it has not
    import transformers

    content = json.loads((folder / "config.json").read_text())
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, content["torch_dtype"]))
    with WeightReader(folder, device) as weights:
        state = {name: weights.take(name, *tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    model.eval()
    ids, cache, tokens, marks = torch.tensor([prompt], device=device), None, [], []
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))  # waits for the device
            marks.append(time.perf_counter())
    steps = [b - a for a, b in pairwise(marks)]
    return tokens, statistics.median(steps), transformers.__version__
