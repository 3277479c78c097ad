"""Which cards are here: nvidia-smi's answer and CUDA_VISIBLE_DEVICES, by literals; and a fake nvidia-smi on PATH."""

from pathlib import Path

import pytest

from baton.launch.gpus import Gpu, find_gpu, list_gpus, listing, parse_gpus, visible_gpus

GIB = 1024**3
ANSWER = """\
0, GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f, NVIDIA H200, 9.0, 143771, 143156, 580.65.06
1, GPU-5c8a0000-d268-c3f3-1b07-005d5ae1dc3f, Tesla T4, 7.5, 15360, 14900, 580.65.06
2, GPU-77777777-d268-c3f3-1b07-005d5ae1dc3f, NVIDIA GB10, 12.1, [N/A], [N/A], 580.65.06
"""
FOUR = tuple(Gpu(i, f"GPU-{i}{i}ab", "card") for i in range(4))


def test_the_answer_of_nvidia_smi():
    gpus, driver = parse_gpus("WARNING: something, with commas, everywhere\n" + ANSWER)
    assert driver == "580.65.06"
    assert gpus == (
        Gpu(0, "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "NVIDIA H200", 90, 143771 * 1024**2, 143156 * 1024**2),
        Gpu(1, "GPU-5c8a0000-d268-c3f3-1b07-005d5ae1dc3f", "Tesla T4", 75, 15 * GIB, 14900 * 1024**2),
        Gpu(2, "GPU-77777777-d268-c3f3-1b07-005d5ae1dc3f", "NVIDIA GB10", 121, 0, 0),
    )
    assert gpus[0].text == "cuda:0 (NVIDIA H200)"


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["GPU-00ab", "GPU-11ab", "GPU-22ab", "GPU-33ab"]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", ["GPU-22ab"]),
        ("3,1", ["GPU-33ab", "GPU-11ab"]),
        (" 3 , 1 ", ["GPU-33ab", "GPU-11ab"]),
        ("0,7,1", ["GPU-00ab"]),  # as in CUDA: nothing counts behind an unknown one
        ("1,-1,2", ["GPU-11ab"]),
        ("1,,2", ["GPU-11ab"]),
        ("1,1,2", ["GPU-11ab", "GPU-22ab"]),
        ("GPU-2", ["GPU-22ab"]),
        ("GPU-33ab,0", ["GPU-33ab", "GPU-00ab"]),
        ("GPU-", []),  # four cards begin so
        ("33ab", []),
        ("MIG-33ab-77,2", ["MIG-33ab-77", "GPU-22ab"]),
        ("MIG-GPU-33ab/1/0", ["MIG-GPU-33ab/1/0"]),
    ],
)
def test_what_cuda_visible_devices_leaves(variable, uuids):
    left = visible_gpus(FOUR, variable)
    assert [gpu.uuid for gpu in left] == uuids
    assert [gpu.index for gpu in left] == list(range(len(uuids)))


def test_an_index_means_a_place_among_the_visible():
    left = visible_gpus(FOUR, "2,3")
    assert find_gpu(left, "0") == Gpu(0, "GPU-22ab", "card")
    assert find_gpu(left, "2") is None
    assert find_gpu(left, "GPU-0") is None


@pytest.mark.parametrize(
    ("text", "variable", "words"),
    [("", None, "finds no card"), ("No devices were found\n", None, "finds no card"), (ANSWER, "", "hides every card")],
)
def test_why_there_is_none(text, variable, words):
    found = listing(text, variable)
    assert found.gpus == ()
    assert words in found.problem
    assert found.fix


# ---- a fake nvidia-smi -----------------------------------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch):
    """Put a script of that name on PATH, first and alone."""

    def install(body: str, mode: int = 0o755) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(body)
        script.chmod(mode)

    monkeypatch.setenv("PATH", str(tmp_path))
    return install


def test_a_machine_without_a_driver(nvidia_smi, monkeypatch):
    monkeypatch.setattr("baton.launch.gpus._DEVICE_FILES", ())
    found = list_gpus()
    assert (found.gpus, found.fix) == ((), "")
    assert "no NVIDIA driver" in found.problem


def test_a_card_without_nvidia_smi(nvidia_smi, monkeypatch, tmp_path):
    monkeypatch.setattr("baton.launch.gpus._DEVICE_FILES", (str(tmp_path),))
    assert "utility" in list_gpus().fix


def test_it_is_asked_for_the_cards(nvidia_smi):
    columns = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
    nvidia_smi(
        f'#!/bin/sh\n[ "$1" = --query-gpu={columns} ] || exit 1\n[ "$2" = --format=csv,noheader,nounits ] || exit 1\n'
        f"while read -r line; do echo \"$line\"; done <<'.'\n{ANSWER}.\n"
    )
    found = list_gpus("1,0")
    assert [gpu.name for gpu in found.gpus] == ["Tesla T4", "NVIDIA H200"]
    assert (found.driver, found.problem) == ("580.65.06", "")


def test_its_failure_is_told(nvidia_smi):
    nvidia_smi("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate'\necho more\nexit 9\n")
    assert list_gpus().problem == "nvidia-smi says 'NVIDIA-SMI has failed because it could not communicate'"
    nvidia_smi("#!/bin/sh\nexit 3\n")
    assert "exit code 3" in list_gpus().problem
    nvidia_smi("not a program")
    assert "cannot be run" in list_gpus().problem


def test_a_card_that_hangs_is_not_waited_for(nvidia_smi, monkeypatch):
    monkeypatch.setattr("baton.launch.gpus._TIMEOUT_S", 0.2)
    nvidia_smi("#!/bin/sh\nread -r line < /dev/zero\nwhile :; do :; done\n")
    assert "did not answer" in list_gpus().problem
