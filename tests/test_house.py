"""The house: who may import whom, what every file looks like, and that the map in docs/structure.md is true."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600  # lists of cases
MAX_FUNCTION_LINES = 60

# room |-> rooms it may import. docs/structure.md says why.
_WORKER = {"core", "vocab", "radix_cache", "kernels", "models", "engine", "transfer"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "vocab": {"core"},
    "radix_cache": {"core"},
    "kernels": set(),
    "models": {"core", "kernels", "vocab"},
    "engine": {"core", "kernels", "models", "vocab"},
    "transfer": {"core"},
    "worker": {"core", "radix_cache", "engine", "transfer"},
    "prefill": {"worker", *_WORKER},
    "decode": {"worker", *_WORKER},
    "gateway": {"core", "vocab", "radix_cache", "transfer"},
    "bench": {"core", "vocab"},
    "sim": {"core", "radix_cache", "prefill", "decode", "worker", "gateway"},  # of the last four what is pure
}
MAY_IMPORT["launch"] = {*MAY_IMPORT}

# Rooms whose third-party imports are counted, beside the standard library.
THIRD_PARTY: dict[str, set[str]] = {
    "core": {"msgspec"},
    "radix_cache": {"msgspec", "numpy", "xxhash"},
    "vocab": {
        "gguf",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "msgspec",
        "numpy",
        "rich",
        "safetensors",
        "tokenizers",
    },
    "gateway": {"aiohttp", "msgspec", "prometheus_client", "uvloop"},
    "bench": {"aiohttp", "cyclopts", "msgspec", "numpy", "rich", "uvloop"},
    "kernels": {"torch", "triton"},
    "sim": {"msgspec"},
}
TORCH_ROOMS = {"kernels", "models", "engine", "worker", "prefill", "decode"}

# file |-> why it may sleep
MAY_SLEEP = {"tests/launch/launch_builders.py": "polls a condition with a bound"}

ROOMS = sorted(MAY_IMPORT)
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
SOURCES = [*MODULES, *TESTS, *SCRIPTS]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _imported_rooms(path: Path) -> Iterator[str]:
    """Rooms named by relative imports that leave the file's own room."""
    depth = len(path.relative_to(ROOT).parts) - 1  # level that still is inside the room
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level > depth:
            if node.level > depth + 1:
                raise AssertionError(f"{_name(path)}: an import leaves the package")
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]


def _absolute_imports(path: Path) -> Iterator[str]:
    """Top-level names of absolute imports, whole ones too when a part is banned."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.module.split(".")[0]


def _attributes(path: Path) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute))


def _only_filled(wrong: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: what for name, what in wrong.items() if what}


def _tracked_files() -> list[Path]:
    """What git knows; without git (an unpacked archive) every text file outside of hidden and built folders."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [*MODULES, *TESTS, *SCRIPTS, *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]


def test_a_room_imports_only_what_the_table_allows():
    # `from .. import __version__` is the package itself
    allowed = {room: MAY_IMPORT[room] | {room, "__version__"} for room in ROOMS}
    wrong = {_name(path): sorted({*_imported_rooms(path)} - allowed[_room(path)]) for path in MODULES}
    assert _only_filled(wrong) == {}


def test_third_party_imports_stay_in_their_rooms():
    wrong = {}
    for path in MODULES:
        room = _room(path)
        imported = {name for name in _absolute_imports(path) if name not in sys.stdlib_module_names}
        banned = {"baton"}  # rooms import each other relatively
        if room not in TORCH_ROOMS and not (room == "transfer" and "backends" in path.parts):
            banned |= {"torch", "triton"}
        foreign = imported - THIRD_PARTY[room] if room in THIRD_PARTY else set()
        wrong[_name(path)] = sorted(foreign | imported & banned)
    assert _only_filled(wrong) == {}


def test_every_module_has_a_docstring():
    assert [_name(path) for path in [*MODULES, *SCRIPTS] if not ast.get_docstring(_tree(path))] == []


def test_files_and_functions_can_be_read_in_one_go():
    limits = {path: MAX_TEST_FILE_LINES if path in TESTS else MAX_FILE_LINES for path in SOURCES}
    assert [_name(path) for path, limit in limits.items() if len(path.read_text().splitlines()) > limit] == []
    long_functions = [
        f"{_name(path)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long_functions == []


def test_nothing_unpickles():
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "recv_pyobj", "send_pyobj"}
    wrong = {
        _name(path): sorted(banned & ({*_absolute_imports(path)} | {node.attr for node in _attributes(path)}))
        for path in [*MODULES, *SCRIPTS]  # tests attack sockets with pickles
    }
    assert _only_filled(wrong) == {}


def test_nothing_sleeps():
    sleeping = [
        _name(path)
        for path in SOURCES
        for node in _attributes(path)
        if node.attr == "sleep" and isinstance(node.value, ast.Name) and node.value.id == "time"
    ]
    assert set(sleeping) == set(MAY_SLEEP)


def test_the_package_list_is_the_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = (path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py"))
    found = {"baton", *("baton." + folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in folders)}
    assert set(listed) == found
    assert len(listed) == len(found)


def test_every_folder_with_modules_is_a_room():
    with_modules = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert with_modules == set(ROOMS)


def test_one_module_stands_at_the_root():
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_every_room_has_tests():
    assert [room for room in ROOMS if not list((ROOT / "tests" / room).glob("test_*.py"))] == []


_WITHOUT_TORCH = ["gateway.app", "bench.command", "vocab.source", "transfer.channels", "launch.cli", "sim.simulation"]


@pytest.mark.parametrize("module", _WITHOUT_TORCH)
def test_it_starts_without_torch(module):
    code = f"import sys, baton.{module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr or "torch was imported"


def test_the_simulation_has_no_scheduler_of_its_own():
    """What it finds must hold for the server: it drives the production classes and decides nothing itself."""
    decided_elsewhere = re.compile(r"Scheduler|Queue|Router|Placement|Admission|Tuner|Policy")
    decisions = {"plan", "next_waiting", "admit", "make_room", "choose", "enqueue", "with_credit", "acquire", "evict"}
    imported, wrong = set(), []
    for path in (ROOT / "sim").glob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef) and decided_elsewhere.search(node.name):
                wrong.append(f"{_name(path)}: class {node.name}")
            elif isinstance(node, ast.FunctionDef) and node.name in decisions:
                wrong.append(f"{_name(path)}: {node.name}")
    assert wrong == []
    assert imported >= {"DecodeScheduler", "PrefillScheduler", "SequenceBlocks", "Dispatcher", "Placement", "Admission"}


def _structure_sections() -> dict[str, str]:
    text = (ROOT / "docs" / "structure.md").read_text()
    parts = re.split(r"^### `([a-z_]+)/`.*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_map_names_every_module():
    named = {
        f"{room}/{name}"
        for room, section in _structure_sections().items()
        for name in re.findall(r"^\| `([\w/]+\.py)` \|", section, flags=re.MULTILINE)
    }
    present = {_name(path) for path in MODULES if path.name != "__init__.py"}
    difference = f"missing: {sorted(present - named)}; gone: {sorted(named - present)}"
    assert named == present, f"{difference}. Run scripts/write_structure.py"


def test_the_map_shows_the_import_table():
    text = (ROOT / "docs" / "structure.md").read_text()
    rows = re.findall(r"^\| `([a-z_]+)/` \|.*\|([^|]*)\|$", text, flags=re.MULTILINE)
    shown = {room: set(re.findall(r"`([a-z_]+)`", allowed)) for room, allowed in rows}
    assert shown == {room: allowed for room, allowed in MAY_IMPORT.items() if room != "launch"} | {"launch": set()}


def test_links_in_the_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = chain.from_iterable(
        ((document, link) for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()))
        for document in documents
    )
    assert [f"{_name(document)}: {link}" for document, link in links if not (document.parent / link).exists()] == []


def test_no_path_of_a_machine_is_in_the_repository():
    machine_path = re.compile(r"(?<![\w.])/work/(?:main|shared)|\.\./" + r"shared/|/tmp/v/|/root/")
    suffixes = {".py", ".md", ".toml", ".json", ".txt", ".yml", ""}
    found = []
    for path in _tracked_files():
        if path.suffix in suffixes and path != Path(__file__).resolve():
            found += [
                _name(path) for line in path.read_text(errors="replace").splitlines() if machine_path.search(line)
            ]
    assert found == []
