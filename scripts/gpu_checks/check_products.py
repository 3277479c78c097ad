"""Matrix products and sampling on the device: their definitions, the CPU sampler's tokens, the same bits in a batch."""

import torch

from baton.core.request import SamplingParams
from baton.engine.feedback import make_feedback
from baton.engine.philox import seed_words
from baton.engine.sampler import HostSampler, SamplingRow
from baton.kernels import cpu, reference
from baton.kernels.gpu.gemm import linear
from baton.kernels.gpu.grouped_gemm import moe_forward
from baton.kernels.gpu.int8_gemm import int8_linear, quantize_int8
from baton.kernels.gpu.logprobs import token_logprobs
from baton.kernels.gpu.penalties import add_bias, apply_penalties, keep_allowed
from baton.kernels.gpu.sampling import SamplingTensors, argmax, sample

from .compare import Bench, close, same

# rows, in_features, out_features
SHAPES = ((1, 4096, 6144), (5, 123, 123), (64, 1024, 4096), (257, 4096, 4096), (4097, 1024, 1024))
TINY_SHAPES = ((5, 123, 45), (33, 64, 64))


def dense(bench: Bench) -> str:
    """Rows alone have the bits they have in the batch."""
    worst = 0.0
    for rows, in_features, out_features in TINY_SHAPES if bench.is_tiny else SHAPES:
        x, weight = bench.random(rows, in_features), bench.random(out_features, in_features) * in_features**-0.5
        bias = bench.random(out_features)
        got = linear(x, weight, bias, out=bench.poisoned(rows, out_features))
        what = f"{rows} rows, {in_features} to {out_features}"
        worst = max(worst, close(bench, got, reference.linear(x, weight, bias), what))
        row = rows // 2
        same(linear(x[row : row + 1], weight, bias), got[row : row + 1], f"{what}: a row alone")
        logits = linear(x, weight, out_dtype=torch.float32)
        close(bench, logits, reference.linear(x, weight), f"{what}, float32 out")
    return f"error {worst:.1e}"


def int8(bench: Bench) -> str:
    worst = 0.0
    for rows, in_features, out_features in TINY_SHAPES if bench.is_tiny else SHAPES:
        x, weight = bench.random(rows, in_features), bench.random(out_features, in_features) * in_features**-0.5
        values, scale = quantize_int8(weight)
        got = int8_linear(x, values, scale, out=bench.poisoned(rows, out_features))
        what = f"int8, {rows} rows, {in_features} to {out_features}"
        worst = max(worst, close(bench, got, reference.int8_linear(x, values, scale), what))
        row = rows // 2
        same(int8_linear(x[row : row + 1], values, scale), got[row : row + 1], f"{what}: a row alone")
    return f"error {worst:.1e}"


def experts(bench: Bench) -> str:
    worst = 0.0
    sizes = ((5, 4, 32, 16, 2),) if bench.is_tiny else ((1, 128, 2048, 768, 8), (37, 8, 123, 45, 2))
    for rows, count, hidden, size, top_k in sizes:
        x, logits = bench.random(rows, hidden), bench.random(rows, count)
        gate_up, down = bench.random(count, 2 * size, hidden) * hidden**-0.5, bench.random(count, hidden, size)
        down = down * size**-0.5
        got = moe_forward(x, logits, gate_up, down, top_k, True)
        on_host = (t.float().cpu() for t in (x, logits, gate_up, down))
        worst = max(worst, close(bench, got, reference.moe_forward(*on_host, top_k, True), f"{count} experts"))
        last = slice(rows - 1, rows)
        same(moe_forward(x[last], logits[last], gate_up, down, top_k, True), got[last], "a token's experts alone")
    return f"error {worst:.1e}"


def sampling(bench: Bench) -> str:
    """The CPU sampler's tokens for every kind of row; a row's token does not depend on its company."""
    vocab_size, repeats = (101, 1) if bench.is_tiny else (128256, 8)
    kinds = [(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 50, 1.0, 0.0), (0.9, 0, 0.9, 0.0), (1.3, 20, 0.8, 0.02)]
    params = [SamplingParams(t, k, p, m, seed=77 + i) for i, (t, k, p, m) in enumerate(kinds * repeats)]
    rows = [SamplingRow(p, i % 2, 1000 + i) for i, p in enumerate(params)]
    logits = 3 * torch.randn(len(rows), vocab_size)
    want = HostSampler(make_feedback(torch.device("cpu"))).sample(logits, rows)
    on_device = logits.to(bench.device)
    got = sample(on_device, _tensors(bench, rows)).tolist()
    assert got == want, f"{sum(a != b for a, b in zip(got, want, strict=True))} of {len(want)} tokens differ"
    alone = [
        int(sample(on_device[i : i + 1], _tensors(bench, rows[i : i + 1]))) for i in range(2 if bench.is_tiny else 10)
    ]
    assert alone == want[: len(alone)], "a row alone gets another token"
    assert argmax(on_device).tolist() == logits.argmax(-1).tolist(), "greedy"
    return f"{len(rows)} rows, equal tokens"


def _tensors(bench: Bench, rows: list[SamplingRow]) -> SamplingTensors:
    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(r.params, name) for r in rows], dtype=torch.float64, device=bench.device)

    seeds = [seed_words(row.params.seed) for row in rows]
    integers = (
        [row.params.top_k for row in rows],
        [low for low, _ in seeds],
        [high for _, high in seeds],
        [row.choice for row in rows],
        [row.position for row in rows],
    )
    top_k, *rest = (bench.ints(values, torch.int64) for values in integers)
    return SamplingTensors(floats("temperature"), top_k, floats("top_p"), floats("min_p"), *rest)


def penalties(bench: Bench) -> str:
    """A token that comes twice is penalised once for repetition and twice for frequency; bias suppresses."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]] * 2, device=bench.device)
    floats = [torch.tensor([v, 1.0 if v == 2.0 else 0.0], device=bench.device) for v in (2.0, 0.5, 0.25)]
    apply_penalties(logits, bench.ints([0, 0, 0]), bench.ints([0, 1, 2]), bench.ints([0, 0, 2]), *floats)
    want = torch.tensor([[1.0, -4.0, 0.5 - 0.5 - 0.5, 0.5, 3.0], [2.0, -2.0, 1.0, 0.5, 3.0]])
    close(Bench(bench.device, torch.float32, bench.is_tiny), logits, want, "penalties")
    add_bias(logits, bench.ints([1]), bench.ints([4]), torch.tensor([-torch.inf], device=bench.device))
    assert logits[1, 4] == -torch.inf, "the bias did not arrive"
    assert logits[0, 4] == 3.0, "the bias went to another row"
    keep_allowed(logits, bench.ints([0]), bench.ints([0b01010]).view(1, 1))
    assert logits.isfinite().tolist() == [[False, True, False, True, False], [True] * 4 + [False]], "the mask"
    return "exact"


def logprobs(bench: Bench) -> str:
    """Of given tokens and of the five likeliest, equal ones by their ids, as on the CPU."""
    vocab_size, rows = (101, 3) if bench.is_tiny else (128256, 16)
    logits = (3 * torch.randn(rows, vocab_size)).mul_(16).round_().div_(16)  # many are equal
    token_ids = torch.arange(rows)
    want, want_top, want_ids = cpu.token_logprobs(logits, token_ids, 5)
    ids = token_ids.to(bench.device)
    got, got_top, got_ids = token_logprobs(logits.to(bench.device), ids, ids, 5)
    assert got_ids.tolist() == want_ids.tolist(), "the likeliest tokens"
    worst = max(float((got.cpu() - want).abs().max()), float((got_top.cpu() - want_top).abs().max()))
    assert worst < 1e-4, f"log-probabilities are off by {worst:.1e}"
    return f"{rows} rows, error {worst:.1e}"
