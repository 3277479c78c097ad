"""The command line: `baton serve`, `gateway`, `prefill`, `decode`, `roles`, `pull`, `bench`, `chat`, `doctor`.

Commands import what they need when they run, so that `baton --help` stays fast.
"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from .. import __version__
from ..core.errors import BatonError, ConfigurationError
from ..core.messages import Role
from .options import CommonFlags, EngineFlags, GatewayFlags, PoolFlags, SchedulingFlags

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

Pools = Annotated[PoolFlags, Parameter(name="*")]
Engine = Annotated[EngineFlags, Parameter(name="*")]
Scheduling = Annotated[SchedulingFlags, Parameter(name="*")]
Gateway = Annotated[GatewayFlags, Parameter(name="*")]
Common = Annotated[CommonFlags, Parameter(name="*")]

_POOLS, _ENGINE, _GATEWAY, _COMMON = PoolFlags(), EngineFlags(), GatewayFlags(), CommonFlags()
_SCHEDULING = SchedulingFlags()

app = App(
    name="baton",
    version=__version__,
    version_flags=["--version"],
    help="Serve open-weight language models with prefill and decode in separate processes.",
    print_error=False,
    exit_on_error=False,
)


@app.command
def serve(
    model: str | None = None,
    /,
    *,
    pools: Pools = _POOLS,
    engine: Engine = _ENGINE,
    gateway: Gateway = _GATEWAY,
    common: Common = _COMMON,
) -> int:
    """Start a gateway and its workers on this machine.

    Parameters
    ----------
    model
        Nothing (SmolLM2-135M-Instruct), a folder, a .gguf file, or hf:ORG/NAME.
    """
    from .serve import serve as run

    run(model, pools, engine, gateway, common)
    return 0


@app.command(name="gateway")
def gateway_command(
    model: str | None = None,
    /,
    *,
    key_file: Path | None = None,
    dtype: str = "auto",
    scheduling: Scheduling = _SCHEDULING,
    gateway: Gateway = _GATEWAY,
    common: Common = _COMMON,
) -> int:
    """Start a gateway alone; workers join it.

    Parameters
    ----------
    model
        The model that its workers run, as in `baton serve`.
    key_file
        Keys of the cluster; made when the file does not exist. Copy it to the workers' machines.
    dtype
        Weights of its workers; auto is what a worker on this machine would choose. A worker that differs is refused.
    """
    from .serve import serve_gateway

    serve_gateway(model, key_file, dtype, scheduling, gateway, common)
    return 0


@app.command
def prefill(
    model: str | None = None,
    /,
    *,
    join: str,
    key_file: Path,
    engine: Engine = _ENGINE,
    common: Common = _COMMON,
) -> int:
    """Join a running server as a prefill worker.

    Parameters
    ----------
    model
        The model the server runs.
    join
        ADDR,...: the gateways' join addresses, as `baton serve` prints them.
    key_file
        Keys of the cluster, as `baton serve` prints it.
    """
    return _join(Role.PREFILL, model, join, key_file, engine, common)


@app.command
def decode(
    model: str | None = None,
    /,
    *,
    join: str,
    key_file: Path,
    engine: Engine = _ENGINE,
    common: Common = _COMMON,
) -> int:
    """Join a running server as a decode worker.

    Parameters
    ----------
    model
        The model the server runs.
    join
        ADDR,...: the gateways' join addresses, as `baton serve` prints them.
    key_file
        Keys of the cluster, as `baton serve` prints it.
    """
    return _join(Role.DECODE, model, join, key_file, engine, common)


@app.command
def roles(worker: str | None = None, roles: str | None = None, /, *, url: str = DEFAULT_URL) -> int:
    """Show what each worker of a running server does, or change it while requests run.

    Parameters
    ----------
    worker
        The worker to change, for example decode-0.
    roles
        Its roles from now on: prefill, decode or prefill+decode.
    url
        Where the server is.
    """
    from .roles import roles as run

    return run(url, worker, roles)


@app.command
def pull(model: str | None = None, /) -> int:
    """Fetch a model, and convert it where that is needed, so that a later start finds it.

    Parameters
    ----------
    model
        Nothing (SmolLM2-135M-Instruct), a .gguf file, or hf:ORG/NAME.
    """
    from ..vocab.progress import default_progress
    from ..vocab.source import default_cache_dir, resolve_model

    source = resolve_model(model, default_cache_dir(), default_progress())
    print(f"{source.name} is in {source.folder}")
    return 0


@app.command
def chat(url: str = DEFAULT_URL, /, *, max_tokens: int = 512) -> int:
    """Talk to a running server in this terminal.

    Parameters
    ----------
    url
        Where the server is.
    max_tokens
        Longest answer.
    """
    from .chat import chat as run

    return run(url, max_tokens)


@app.command
def doctor() -> int:
    """Show what Baton finds on this machine, with one fix for each problem."""
    from .doctor import examine, write_report

    return write_report(examine(), sys.stdout)


app.command("baton.launch.bench_app:app", name="bench", help="Load any OpenAI-compatible server and measure it.")


def _join(role: Role, model: str | None, join: str, key_file: Path, engine: EngineFlags, common: CommonFlags) -> int:
    from .join import join as run

    run(role, model, join, key_file, engine, common)
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Entry of the `baton` script: what, why and the next step instead of a traceback (except with --debug)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        sys.exit(app(arguments))
    except CycloptsError as error:
        _fail(f"{error}".strip() + "\nSee `baton --help`.", EXIT_USAGE)
    except BatonError as error:
        if "--debug" in arguments:
            raise
        _fail(str(error), EXIT_USAGE if isinstance(error, ConfigurationError) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _fail(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)
