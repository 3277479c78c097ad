"""Device, kernels, dtype and transport: what auto means and which combinations are refused, by literals."""

import msgspec
import pytest

from baton.core.errors import ConfigurationError
from baton.launch.compute import Compute, require_nccl_pairs, resolve_compute, resolve_device, resolve_gateway_dtype
from baton.launch.gpus import GpuListing
from baton.launch.machine import missing_for_triton, torch_cuda_version
from baton.launch.options import EngineFlags, parse_engine_options
from baton.launch.placement import place_workers


def resolve(machine, **changes) -> Compute:
    return resolve_compute(parse_engine_options(EngineFlags(**changes)), machine)


def test_auto(builders):
    cpu = builders.MACHINE
    assert resolve(cpu) == Compute("cpu", "torch", "float16", "float32")
    assert resolve(msgspec.structs.replace(cpu, architecture="aarch64")) == Compute(
        "cpu", "torch", "float32", "float32"
    )
    assert resolve(builders.gpu_machine()) == Compute("cuda", "triton", "bfloat16", "bfloat16")
    assert resolve(builders.gpu_machine(), device="cpu") == Compute("cpu", "torch", "float16", "float32")
    old = GpuListing(builders.cards(1, capability=75), "580.65")
    assert resolve(builders.gpu_machine(cards=old)) == Compute("cuda", "triton", "float16", "float16")
    unknown = GpuListing(builders.cards(1, capability=0), "580.65")
    assert resolve(builders.gpu_machine(cards=unknown)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("int8", "bfloat16")],
)
def test_the_cache_is_kept_as_the_activations(builders, dtype, kv_dtype):
    assert resolve(builders.gpu_machine(), dtype=dtype) == Compute("cuda", "triton", dtype, kv_dtype)


def test_the_interpreter_is_for_developers(builders):
    machine = msgspec.structs.replace(builders.MACHINE, has_triton=True, interprets_triton=True)
    assert resolve(machine, kernels="triton") == Compute("cpu", "triton", "float32", "float32")
    assert resolve(machine, kernels="triton", dtype="float16") == Compute("cpu", "triton", "float16", "float16")
    assert resolve(machine, kernels="triton", deterministic=True).kernels == "triton"
    assert resolve(machine).kernels == "torch"  # only when asked for


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, ["--device cuda", "no NVIDIA driver", "--device cpu"]),
        ({"device": "cuda:1"}, ["--device cuda", "no NVIDIA driver", "--device cpu"]),
        ({"kernels": "triton"}, ["--kernels triton", "need a GPU", "--kernels torch"]),
        ({"deterministic": True}, ["--deterministic", "--device cpu"]),
        ({"dtype": "int8"}, ["--dtype int8", "--device cuda", "slower", "float16"]),
        ({"dtype": "bfloat16"}, ["--dtype bfloat16", "--device cuda", "slower", "float16"]),
        ({"transport": "nccl"}, ["--transport nccl", "CPU", "gloo"]),
        ({"transport": "cuda_ipc"}, ["--transport cuda_ipc", "CPU"]),
        ({"transport": "pinned_memory"}, ["--transport pinned_memory", "CPU"]),
    ],
)
def test_what_the_cpu_cannot(builders, changes, words):
    machine = msgspec.structs.replace(
        builders.MACHINE, has_triton=True, cards=GpuListing(problem="no NVIDIA driver is installed here")
    )
    with pytest.raises(ConfigurationError) as caught:
        resolve(machine, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": "torch"}, ["--kernels torch", "CPU path", "--device cpu"]),
        ({"transport": "gloo"}, ["--transport gloo", "nccl"]),
        ({"dtype": "bfloat16"}, ["--dtype bfloat16", "sm_75", "--dtype float16"]),
        ({"dtype": "int8"}, ["--dtype int8", "sm_75", "--dtype float16"]),
    ],
)
def test_what_an_old_card_cannot(builders, changes, words):
    machine = builders.gpu_machine(cards=GpuListing(builders.cards(1, capability=75), "580.65"))
    with pytest.raises(ConfigurationError) as caught:
        resolve(machine, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("fields", "problem", "fix"),
    [
        ({"torch_cuda": ""}, "the torch installed here is a CPU build", "pip install"),
        ({"torch_cuda": "13.0", "driver": "570.1"}, "NVIDIA driver 570.1 is too old for torch's CUDA 13.0", "580"),
        ({"torch_cuda": "12.8", "driver": "470.2"}, "NVIDIA driver 470.2 is too old for torch's CUDA 12.8", "525"),
        ({"has_triton": False}, "triton is not installed", "pip install triton"),
        ({"missing_for_triton": ("a C compiler", "gcc")}, "Triton needs a C compiler", "apt install gcc"),
        ({"gpus": (), "problem": "CUDA_VISIBLE_DEVICES='' hides every card", "fix": "unset it"}, "hides", "unset it"),
    ],
)
def test_a_card_that_cannot_be_used_says_why_and_what_to_do(builders, fields, problem, fix):
    of_listing = {name: fields.pop(name) for name in ("gpus", "driver", "problem", "fix") if name in fields}
    cards = msgspec.structs.replace(GpuListing(builders.cards(1), "580.65"), **of_listing)
    machine = builders.gpu_machine(cards=cards, **fields)
    with pytest.raises(ConfigurationError) as caught:
        resolve_device("cuda", machine)
    assert problem in str(caught.value)
    assert fix in str(caught.value)
    device, notes = resolve_device("auto", machine)
    assert device == "cpu"
    assert [problem in note for note in notes] == [True] * len(cards.gpus)  # a card is not passed over in silence


@pytest.mark.parametrize(
    ("torch_cuda", "driver"), [("13.0", "580.65"), ("12.8", "525.1"), ("12.6", ""), ("14.0", "1.0")]
)
def test_drivers_that_do(builders, torch_cuda, driver):
    machine = builders.gpu_machine(cards=GpuListing(builders.cards(1), driver), torch_cuda=torch_cuda)
    assert resolve_device("auto", machine) == ("cuda", ())


def test_a_gateway_takes_what_its_workers_will_have(builders):
    assert resolve_gateway_dtype("auto", builders.MACHINE) == "float16"
    assert resolve_gateway_dtype("auto", builders.gpu_machine()) == "bfloat16"
    assert resolve_gateway_dtype("int8", builders.MACHINE) == "int8"  # its workers are elsewhere


def test_nccl_needs_a_card_for_each_end(builders):
    require_nccl_pairs("nccl", place_workers(1, 1, builders.cards(2)))
    require_nccl_pairs("auto", place_workers(1, 1, builders.cards(1)))
    require_nccl_pairs("nccl", place_workers(0, 2, builders.cards(1)))
    with pytest.raises(ConfigurationError, match=r"--transport nccl.*cuda:0 \(NVIDIA H200\).*--decode-devices"):
        require_nccl_pairs("nccl", place_workers(1, 1, builders.cards(1)))


# ---- what is read from files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("cuda: Optional[str] = None", ""),
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda = "12.8"', "12.8"),
        ("cuda_home = '12.8'", ""),
        ("", ""),
    ],
)
def test_torch_tells_its_cuda_without_being_imported(tmp_path, line, version):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip: Optional[str] = None\n")
    assert torch_cuda_version(tmp_path) == version


def test_what_triton_needs_to_build(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_for_triton(tmp_path) == ("a C compiler", "gcc")
    monkeypatch.setenv("CC", "mycc")
    missing, package = missing_for_triton(tmp_path)
    assert str(tmp_path / "Python.h") in missing
    assert package.startswith("python3.")
    assert package.endswith("-dev")
    (tmp_path / "Python.h").touch()
    assert missing_for_triton(tmp_path) is None
