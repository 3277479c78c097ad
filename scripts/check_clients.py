"""Other people's clients against a real server: litellm, and langchain-openai by LangChain's standard tests.

    python scripts/check_clients.py [FOLDER]

They get a virtual environment of their own in FOLDER (build/clients when none is named; kept for the next time): their
requirements are not Baton's. The server is SmolLM2 in float32 with one prefill and one decode worker.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _helpers import ROOT, load_module

CLIENTS = ROOT / "scripts" / "clients"
PACKAGES = ("litellm", "langchain-openai", "langchain-tests", "pytest")


def environment_in(folder: Path) -> Path:
    """The interpreter of the virtual environment, made where there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "clients"
    python = str(environment_in(folder.absolute()))
    serving = load_module("tests/serving.py")
    with tempfile.TemporaryDirectory() as logs, serving.serve(Path(logs), "smollm2", "--dtype", "float32") as server:
        environment = {
            **os.environ,
            "BATON_URL": server.url,
            "BATON_MODEL": server.model,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        langchain = [
            "-m",
            "pytest",
            "-q",
            "-rfExX",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "-o",
            "asyncio_mode=auto",
            # LangChain keeps one connection pool a process: it outlives the loop of a single test.
            "-o",
            "asyncio_default_test_loop_scope=session",
            "-o",
            "asyncio_default_fixture_loop_scope=session",
            "test_langchain.py",
        ]
        ended = [
            subprocess.run([python, *arguments], cwd=CLIENTS, env=environment, check=False).returncode
            for arguments in (["use_litellm.py"], langchain)
        ]
        server.wait_idle()
    raise SystemExit(1 if any(ended) else 0)


if __name__ == "__main__":
    main()
