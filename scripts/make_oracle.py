"""Make the oracle of the equality tests: transformers' greedy tokens in float32 and the gaps of the two best logits.

    python scripts/make_oracle.py            writes tests/data/oracle_smollm2.json and tests/data/oracle_tiny.json

Needs the dev extra and the default model (`baton pull`). The prompts are in tests/data/equality_prompts.json. Baton's
tokens must equal these, or differ first where the gap is below 2e-3: there two correct float32 sums may disagree.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.vocab.progress import default_progress
from baton.vocab.source import default_cache_dir, resolve_model

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
TINY_PROMPT_LENGTHS = (1, 5, 15, 16, 17, 33, 64, 100)


def greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[dict[str, list]]:
    """For each prompt: its ids, `num_tokens` greedy output ids (end tokens ignored), and the top-two gap at each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    rows = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        gaps = [float(best[0] - best[1]) for best in (logits[0].topk(2).values for logits in output.logits)]
        token_ids = output.sequences[0, len(prompt) :].tolist()
        rows.append({"prompt": prompt, "output": token_ids, "gaps": [round(gap, 6) for gap in gaps]})
        print(f"{len(prompt)} in, {len(token_ids)} out, smallest gap {min(gaps):.5f}", flush=True)
    return rows


def default_model_folder() -> Path:
    return resolve_model(None, default_cache_dir(), default_progress()).folder


def smollm2_prompts(folder: Path) -> list[list[int]]:
    """Token ids of the texts: chats through the template, the long ones as they are."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = json.loads((DATA / "equality_prompts.json").read_text())
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts["chats"]
    ]
    return chats + [tokenizer(text)["input_ids"] for text in texts["documents"]]


def tiny_prompts() -> list[list[int]]:
    """Fixed ids, around block borders; every prompt starts alike so that caches have something to share."""
    return [[3 + (7 * i * i + i * n) % 317 for i in range(n)] for n in TINY_PROMPT_LENGTHS]


def write_tiny_model(folder: Path) -> Path:
    spec = importlib.util.spec_from_file_location("tiny_model", DATA.parent / "tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_tiny_model(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("tiny", "smollm2"))
    only = parser.parse_args().only
    if only != "smollm2":
        with tempfile.TemporaryDirectory() as folder:
            rows = greedy(write_tiny_model(Path(folder) / "tiny-llama"), tiny_prompts(), 16)
        (DATA / "oracle_tiny.json").write_text(json.dumps(rows))
    if only != "tiny":
        rows = greedy(default_model_folder(), smollm2_prompts(default_model_folder()), 64)
        (DATA / "oracle_smollm2.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
