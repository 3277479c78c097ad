"""The real SmolLM2, against transformers. Downloads it once into the default cache."""

import subprocess
import sys
from typing import Any

import pytest

from baton.vocab.chat_template import ChatTemplate
from baton.vocab.converted_model import ModelSource
from baton.vocab.detokenizer import Detokenizer
from baton.vocab.model_config import load_model_config
from baton.vocab.progress import default_progress
from baton.vocab.source import default_cache_dir, resolve_model
from baton.vocab.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXTS = [
    "What is the capital of France?",
    "def f(x):\n\treturn x ** 2  # 1234567890\n",
    "日本語のテキスト, émigré, 🎉🏳️‍🌈, \u0301, \u202e",
    "   leading and trailing   \n\n\n",
    "<|im_start|>user\nhi<|im_end|>",
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "<b>Bye</b> 👋"},
    ],
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model(None, default_cache_dir(), default_progress())


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return Tokenizer.from_folder(source.folder)


@pytest.fixture(scope="module")
def oracle_tokenizer(source: ModelSource) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(source.folder)


def test_what_is_known_of_it(source: ModelSource, tokenizer: Tokenizer) -> None:
    config = load_model_config(source.folder)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (64, 49152, 8192)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (100000.0, 1e-5, True)
    assert config.eos_token_ids == tokenizer.eos_token_ids == (2,)
    assert (tokenizer.vocab_size, source.quantisation_note) == (49152, "weights dequantised from Q4_1")


def test_a_later_start_is_quick_and_needs_neither_gguf_nor_pip(source: ModelSource) -> None:
    code = (
        "import sys, time; start = time.monotonic()\n"
        "from baton.vocab.source import default_cache_dir, resolve_model\n"
        "from baton.vocab.progress import default_progress\n"
        "print(resolve_model(None, default_cache_dir(), default_progress()).folder)\n"
        "assert not {'gguf', 'pip', 'torch', 'numpy'} & sys.modules.keys()\n"
        "print(time.monotonic() - start)\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    folder, seconds = run.stdout.split()
    assert folder == str(source.folder)
    assert float(seconds) < 1
    assert run.stderr == ""


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers(tokenizer: Tokenizer, oracle_tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle_tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == text
    assert tokenizer.decode(ids) == oracle_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompts_are_those_of_transformers(
    source: ModelSource,
    tokenizer: Tokenizer,
    oracle_tokenizer: Any,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
) -> None:
    template = ChatTemplate.from_folder(source.folder, tokenizer)
    assert template is not None
    expected = oracle_tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert template.render(messages, add_generation_prompt) == expected


def test_the_converted_weights_answer(source: ModelSource, tokenizer: Tokenizer) -> None:
    """Rows of q or k in the wrong order, or a wrong end token, would make noise of this."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    template = ChatTemplate.from_folder(source.folder, tokenizer)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "What is the capital of France?"}])
    model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt)])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=2
    )[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == 2
