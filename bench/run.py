"""One benchmark from configuration to report: ask the server who it is, build the workload, offer it, measure."""

import asyncio
import dataclasses

import aiohttp
import msgspec

from ..core.errors import ConfigurationError
from ..core.trace import read_trace
from .client import open_http
from .load import Load
from .metrics import compute_metrics
from .options import BenchConfig
from .progress import LoadProgress
from .report import Report, ServerInfo, environment, now_utc
from .stream import error_text
from .trace import trace_workload
from .workloads import Alphabet, Workload, synthetic_workload, warmup_workload

_INFO_TIMEOUT_S = 10.0


class _ListedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


async def run(config: BenchConfig, progress: LoadProgress | None = None, stop: asyncio.Event | None = None) -> Report:
    """Runs the benchmark. Once `stop` is set, what is in flight is dropped and the report covers what had ended.

    Raises ConfigurationError for impossible options, an unreachable server, an unknown model or a failed warm-up.
    A request that fails during the measurement is in the report, not raised.
    """
    config.check()
    facts = environment()  # before the load, which would show in the load average
    async with open_http() as http:
        server = await ask_server(http, config)
        alphabet = _choose_alphabet(config, server)
        workload = _build_workload(config, alphabet, server)
        await _warm_up(http, config, server, alphabet, stop)
        started_at = now_utc()
        load = Load(http, config, server.model, workload)
        duration_s = await load.offer(progress, stop)
    return Report(
        config=config,
        server=server,
        started_at=started_at,
        environment=facts,
        metrics=compute_metrics(load.records, duration_s, config.goodput_ms),
        records=load.records,
        notes=list(workload.notes),
        unfinished=workload.num_requests - len(load.records),
    )


async def ask_server(http: aiohttp.ClientSession, config: BenchConfig) -> ServerInfo:
    """Which model is asked, and its limits as far as /v1/models tells. Raises ConfigurationError (see `run`)."""
    url, wanted = f"{config.base_url}/v1/models", config.target.model
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=_INFO_TIMEOUT_S)) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigurationError(
            f"no server answers at {config.base_url} ({error or type(error).__name__}); "
            "start one with `baton serve`, or give the URL of a running one"
        ) from error
    if status != 200:
        if wanted is not None:  # not every server lists its models
            return ServerInfo(wanted)
        raise ConfigurationError(f"{url} answers HTTP {status}: {error_text(body)}; name the model with --model")
    try:
        models = msgspec.json.decode(body, type=_ModelList).data
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{url} does not answer like an OpenAI server ({error}); check the URL") from error
    for model in models:
        if wanted in (None, model.id):
            return ServerInfo(model.id, model.max_model_len, model.vocab_size)
    listed = ", ".join(model.id for model in models) or "none"
    raise ConfigurationError(f"the server does not list the model {wanted or '(any)'}; it lists: {listed}")


def _choose_alphabet(config: BenchConfig, server: ServerInfo) -> Alphabet:
    """Token ids where the API takes them and answers need not be appended as text; else words."""
    vocab_size = config.target.vocab_size or server.vocab_size
    if vocab_size is None or config.target.endpoint == "chat" or config.workload.workload == "multi-turn":
        return Alphabet.of_words()
    return Alphabet.of_token_ids(vocab_size)


def _build_workload(config: BenchConfig, alphabet: Alphabet, server: ServerInfo) -> Workload:
    options, load = config.workload, config.load
    if options.trace is None:
        return synthetic_workload(options, alphabet, load.rate)
    rows = read_trace(options.trace, options.num_requests)
    workload = trace_workload(rows, alphabet, options.seed, load.rate, server.max_model_len)
    return workload if config.concurrency is None else dataclasses.replace(workload, arrivals_s=None)


async def _warm_up(
    http: aiohttp.ClientSession,
    config: BenchConfig,
    server: ServerInfo,
    alphabet: Alphabet,
    stop: asyncio.Event | None,
) -> None:
    workload = warmup_workload(config.workload, alphabet, config.load.warmup)
    load = Load(http, config, server.model, workload)
    await load.offer(None, stop)
    for record in load.records:
        if record.error is not None:
            raise ConfigurationError(f"a warm-up request failed, so nothing was measured: {record.error}")
