"""A launcher process over fake children: `fake_launcher.py RECORD BEHAVIOUR...`, one child each. Prints `started`."""

import asyncio
import importlib.util
import sys
from pathlib import Path


def _helper(name: str):  # a file beside this one
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def main(record: Path, behaviours: list[str]) -> None:
    from baton.launch.supervisor import Supervisor

    builders = _helper("launch_builders")
    specs = builders.fake_specs(record, behaviours)
    supervisor = Supervisor(specs, lambda line: print(line, flush=True))

    async def announce() -> None:
        await builders.until(lambda: builders.count(record, "started") >= len(specs))
        print("started", flush=True)

    await supervisor.run(announce)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
