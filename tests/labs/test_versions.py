import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from labs.command import is_chosen
from labs.foreign.styles import STYLES as ALL_STYLES
from labs.versions.__main__ import STYLES, counts_of
from labs.versions.environments import (
    ENVIRONMENTS,
    LOCK,
    lowest_versions,
    make_stand_ins,
    select,
)
from tests.conftest import ROOT


def test_each_pair_of_versions_is_tried():
    pairs = {(found.torch, found.lightning[:3]) for found in ENVIRONMENTS}
    torches = {found.torch for found in ENVIRONMENTS}
    assert pairs == {(torch, lightning) for torch in torches for lightning in ("2.5", "2.6")}
    assert {found.python for found in ENVIRONMENTS} == {"3.11", "3.12", "3.13", "3.14"}
    assert sum(found.is_lowest for found in ENVIRONMENTS) == 1


def test_every_night_all_of_them_are_tried():
    workflow = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())
    names = workflow["jobs"]["older"]["strategy"]["matrix"]["name"]
    assert names == [found.name for found in ENVIRONMENTS]
    on_change = (ROOT / ".github/workflows/ci.yml").read_text()
    (text,) = re.findall(r"make -C labs versions ARGS=(\S+)", on_change)
    assert [is_chosen(found.name, [text]) for found in ENVIRONMENTS].count(True) == 1


def test_each_style_has_a_text_that_names_it():
    for text in STYLES:
        assert [style.name for style in ALL_STYLES if text in style.name], text


def test_an_environment_has_the_lock_without_what_is_replaced():
    selected = select(LOCK.read_text(), without={"torch", "lightning"})
    names = re.findall(r"^([a-z0-9-]+)==", selected, flags=re.M)
    assert {"torchmetrics", "lightning-utilities", "numpy", "pytest"} <= set(names)
    assert not {"torch", "lightning", "triton", "nvidia-nccl-cu13", "cuda-toolkit"} & set(names)
    assert set(re.findall(r"^    (\S)", selected, flags=re.M)) == {"-", "#"}  # hashes and reasons


def test_the_lowest_versions_are_those_that_the_library_allows():
    lowest = lowest_versions()
    oldest = next(found for found in ENVIRONMENTS if found.is_lowest)
    assert oldest.torch.startswith(lowest["torch"])
    assert oldest.lightning.startswith(lowest["lightning"])
    assert lowest["numpy"]


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("== 3 failed, 17 passed in 304.36s (0:05:04) ==", "3 failed, 17 passed"),
        ("90 identical, 10 announced; 130 s", "90 identical, 10 announced"),
    ],
)  # fmt: skip
def test_the_last_line_of_a_part_is_shown_without_seconds(line: str, counts: str):
    assert counts_of(line) == counts


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
def test_a_library_that_needs_cuda_loads_with_a_stand_in_and_finds_no_gpu(tmp_path: Path):
    """As torch's do, it names the version of the function that it calls."""
    source, versions = tmp_path / "cuda.c", tmp_path / "versions"
    source.write_text("int cudaGetDeviceCount(int *n) { return 0; }")
    versions.write_text("libcudart.so.12 { global: *; };")
    real, caller = tmp_path / "libcudart.so.12", tmp_path / "libtorch_cuda.so"
    compile_library(source, real, f"-Wl,-soname,{real.name},--version-script,{versions}")
    source.write_text(
        "int cudaGetDeviceCount(int *n); int ask(void) { int n; return cudaGetDeviceCount(&n); }"
    )
    compile_library(source, caller, str(real), "-Wl,-rpath,$ORIGIN,-z,now")
    real.unlink()
    make_stand_ins(tmp_path)
    assert real.exists()
    assert ctypes.CDLL(str(caller)).ask() == 100


def compile_library(source: Path, library: Path, *options: str) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library, *options], check=True)
