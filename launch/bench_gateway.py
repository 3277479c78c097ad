"""`baton bench gateway`: how many chunks a second one gateway process streams, beside a bare server."""

import asyncio
import contextlib
import json as json_format
import os
import random
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import uvloop

from .. import __version__
from ..bench.report import check_writable, environment
from ..bench.streams import Pace, StreamRun, run_streams
from ..core.errors import BatonError, ConfigurationError
from ..vocab.tokenizer import Tokenizer
from .bench_gateway_server import ServerConfig
from .serve import find_model

EXIT_OK, EXIT_FAILED = 0, 1
NUM_AHEAD = 16
START_TIMEOUT_S = 60.0
BEHIND = Pace(1024, 0.01)  # about 500 chunks a second of one token

_GATEWAY, _FLOOR = "gateway, a token at a time", "bare server, a chunk at a time"


class Contender(msgspec.Struct, frozen=True):
    """What is measured: `num_ahead` as in ServerConfig; `pace` at which its clients read, None: as fast as they can."""

    name: str
    kind: str
    num_ahead: int
    pace: Pace | None = None


CONTENDERS = (
    Contender(_FLOOR, "bare", 1),
    Contender(_GATEWAY, "gateway", 1),
    Contender("bare server, as the socket takes it", "bare", NUM_AHEAD),
    Contender(f"gateway, workers {NUM_AHEAD} steps ahead", "gateway", NUM_AHEAD),
    Contender("gateway, clients that are behind", "gateway", 1, BEHIND),
)


def bench_gateway(
    model: str | None = None,
    *,
    num_streams: int = 64,
    input_len: int = 32,
    output_len: int = 512,
    num_runs: int = 3,
    json: Path | None = None,
) -> int:
    """Measure the gateway alone: its workers are a stand-in that answers at once, in the gateway's own process.

    Streams of /v1/completions, one token a chunk, against an aiohttp server that writes prebuilt chunks of the same
    kind; both on uvloop in one process, the client in another. Apart from that, clients that take less than comes:
    they get several tokens in a chunk. Runs alternate. Every text is compared with the tokenizer's; the exit status is
    1 when one differs.

    Parameters
    ----------
    model
        Whose tokenizer; the default model when left out.
    num_streams
        Streams at once.
    input_len
        Tokens of a prompt.
    output_len
        Tokens of an answer, and so chunks.
    num_runs
        Measured runs of each; the table has medians.
    json
        Write all figures to this file.
    """
    for name, value in (("--num-streams", num_streams), ("--input-len", input_len), ("--output-len", output_len)):
        if value < 1:
            raise ConfigurationError(f"{name} {value}: at least 1 is needed")
    if num_runs < 1:
        raise ConfigurationError(f"--num-runs {num_runs}: at least 1 is needed")
    if json is not None:
        check_writable(json)
    facts = find_model(model)
    bench = GatewayBench(facts.folder, facts.name, num_streams, input_len, output_len)
    machine = environment()
    runs = uvloop.run(bench.run(num_runs))
    print("\n".join([*_machine_lines(machine, bench), "", *table(runs), *bench.problems]))
    if json is not None:
        rates = {name: [run.num_chunks / run.seconds for run in runs[name]] for name in runs}
        content = {"command": sys.argv, "baton": __version__, "machine": machine, "tokens_per_s": bench.rates(runs)}
        json.write_text(json_format.dumps({**content, "chunks_per_s": rates}, indent=1) + "\n")
    return EXIT_FAILED if bench.problems else EXIT_OK


class GatewayBench:
    """`problems` is what was wrong with the answers, in words."""

    def __init__(self, folder: str, served_model: str, num_streams: int, input_len: int, output_len: int):
        tokenizer = Tokenizer.from_folder(Path(folder))
        usual = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) and not tokenizer.is_special(i)]
        dice = random.Random(0)
        self.num_streams, self.input_len, self.output_len = num_streams, input_len, output_len
        self.problems: list[str] = []
        self._answer = dice.choices(usual, k=output_len)
        self._text = tokenizer.decode(self._answer)
        self._folder, self._served_model = folder, served_model
        prompt = dice.choices(usual, k=input_len)
        self._body = msgspec.json.encode(
            {"model": served_model, "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "stream": True}
        )

    async def run(self, num_runs: int) -> dict[str, list[StreamRun]]:
        """Of each contender its runs, after one that does not count."""
        runs: dict[str, list[StreamRun]] = {contender.name: [] for contender in CONTENDERS}
        async with AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(self._server(contender)) for contender in CONTENDERS]
            for number in range(num_runs + 1):
                for contender, port in zip(CONTENDERS, ports, strict=True):
                    run = await run_streams(port, self._body, self.num_streams, contender.pace)
                    self._check(contender, run)
                    if number:
                        runs[contender.name].append(run)
        return runs

    def rates(self, runs: dict[str, list[StreamRun]]) -> dict[str, list[float]]:
        """Of each contender the tokens per second of its runs."""
        num_tokens = self.num_streams * self.output_len
        return {name: [num_tokens / run.seconds for run in runs[name]] for name in runs}

    def _check(self, contender: Contender, run: StreamRun) -> None:
        num_wrong = sum(text != self._text for text in run.texts)
        if num_wrong:
            self.problems.append(f"{contender.name}: {num_wrong} texts are not the tokenizer's")
        expected = self.num_streams * self.output_len
        if contender.num_ahead == 1 and contender.pace is None and run.num_chunks != expected:
            self.problems.append(f"{contender.name}: {run.num_chunks} chunks for {expected} tokens")

    @asynccontextmanager
    async def _server(self, contender: Contender) -> AsyncIterator[int]:
        """A process for it, by its port."""
        config = ServerConfig(
            contender.kind, self._folder, self._served_model, self._answer, self.num_streams, contender.num_ahead
        )
        read_end, write_end = os.pipe()
        # -P: the working directory of the user must not shadow any module.
        command = (sys.executable, "-P", "-m", "baton.launch.bench_gateway_server", str(read_end))
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=(read_end,), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        os.close(read_end)
        try:
            os.write(write_end, msgspec.json.encode(config) + b"\n")
            assert process.stdout is not None
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            if not line:
                raise BatonError(f"the process for {contender.name!r} ended before it answered; its error is above")
            yield int(line)
        finally:
            os.close(write_end)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def table(runs: dict[str, list[StreamRun]]) -> list[str]:
    """Medians and spread of chunks per second, and the gateway's part of its floor."""
    rates = {name: [run.num_chunks / run.seconds for run in of_one] for name, of_one in runs.items()}
    num_tokens = max(run.num_chunks for run in runs[_FLOOR])
    lines = [f"{'':<37}{'chunks/s':>9}  {'least':>7}  {'most':>7}{'us/chunk':>10}{'tokens/s':>10}"]
    for name, values in rates.items():
        median = statistics.median(values)
        tokens = statistics.median(num_tokens / run.seconds for run in runs[name])
        spread = f"{min(values):>7.0f}  {max(values):>7.0f}"
        lines.append(f"{name:<37}{median:>9.0f}  {spread}{1e6 / median:>10.1f}{tokens:>10.0f}")
    ratio = statistics.median(rates[_GATEWAY]) / statistics.median(rates[_FLOOR])
    return [*lines, "", f"{_GATEWAY}: {ratio:.2f} of the floor ({_FLOOR})"]


def _machine_lines(machine: dict[str, str | int | float | list[float]], bench: GatewayBench) -> list[str]:
    return [
        f"{machine['processor']}, {machine['cores']} cores, load {machine.get('load_average_at_start', '?')}, "
        f"Python {machine['python']}, aiohttp {machine['aiohttp']}",
        f"{bench.num_streams} streams, {bench.input_len} tokens in, {bench.output_len} out",
    ]
