"""Each check, with the fault that it should find."""

import errno
import importlib
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest
import torch

from library.tests import pods
from library.tests.kit import Net, make_spec
from library.tests.programs import PATIENCE_S, run_ranks
from library.tests.programs import environment as variables
from samestep.errors import ConfigError
from samestep.plugins import preflight
from samestep.plugins.preflight import compare, identity, inspect
from samestep.ranks import collectives, environment, meeting, network
from samestep.ranks.meeting import MachineError
from samestep.run_spec import RunSpec

Usage = namedtuple("Usage", "total used free")
DATA = L.LightningDataModule()


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., RunSpec]:
    """The facts of a run in ``tmp_path``."""
    return lambda **facts: make_spec(tmp_path / "test", **facts)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that torchrun started this process, with these variables."""

    def pretend(**variables: str) -> None:
        for name, value in {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", **variables}.items():
            monkeypatch.setenv(name, value)

    return pretend


def found(findings: list[preflight.Finding], check: str) -> preflight.Finding:
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def test_a_sound_machine_passes_and_nothing_is_left_behind(spec, model, tmp_path: Path):
    findings = inspect(spec(), model, DATA)
    checks = {"world size", "accelerator", "run directory", "sameness"}
    assert {finding.check for finding in findings} == checks
    assert all(finding.result == "ok" for finding in findings)
    preflight.before_run(spec(), model, DATA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("devices", "nodes", "world_size", "passes"),
    [(2, 2, 4, True), ("auto", 1, 3, True), (2, 1, 3, False), (1, 2, 3, False)],
)
def test_the_number_of_ranks_is_the_configured_one(
    spec, model, torchrun, monkeypatch, devices, nodes, world_size, passes
):
    cfg = spec(devices=devices, num_nodes=nodes)
    torchrun(WORLD_SIZE=str(world_size))
    told = rf"rank 0: ranks: 3, .*devices={devices} x num_nodes={nodes}"
    with nullcontext() if passes else pytest.raises(ConfigError, match=told):
        preflight.before_run(cfg, model, DATA)


@pytest.mark.parametrize(
    ("accelerator", "gpus", "ranks", "passes"),
    [("gpu", 1, 2, False), ("auto", 1, 2, False), ("auto", 0, 2, True), ("cpu", 1, 2, True)],
)
def test_each_rank_needs_a_gpu_of_its_own(
    spec, model, torchrun, monkeypatch, accelerator, gpus, ranks, passes
):
    cfg = spec(accelerator=accelerator)
    torchrun(LOCAL_WORLD_SIZE=str(ranks))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    told = rf"rank 0.*: .*GPUs: {gpus}, ranks: {ranks} here; accelerator={accelerator} "
    with nullcontext() if passes else pytest.raises(ConfigError, match=told):
        preflight.before_run(cfg, model, DATA)


def test_missing_gpus_are_told_before_the_ranks_meet(spec, torchrun, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"GPUs: 0, ranks: 1 here; .* GPU per rank: check the driver"
    ):
        preflight.before_meeting("gpu")
    preflight.before_meeting("cpu")
    assert meeting.find_rank_zero(300) == ""
    torchrun(LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ConfigError, match=r"GPUs: 1, ranks: 2 here; accelerator=gpu .* start fewer"
    ):
        preflight.before_meeting("gpu")


def test_a_run_directory_that_cannot_be_written(spec, model, tmp_path: Path):
    (tmp_path / "test").write_text("a file where the directory should be")
    with pytest.raises(
        ConfigError, match=r"run directory: rank 0: run_dir=.*/test cannot be .*run_dir="
    ):
        preflight.before_run(spec(), model, DATA)


def test_a_full_disk_is_found_by_writing(spec, model, monkeypatch, tmp_path: Path):
    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preflight.os, "fsync", fsync)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device"):
        preflight.before_run(spec(), model, DATA)
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_needs_room_for_three_checkpoints(spec, model, monkeypatch, tmp_path):
    needed = 3 * 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, needed - 1))
    with pytest.raises(ConfigError, match=r"0: 0 MiB free in .*, 1 needed; free some space"):
        preflight.before_run(spec(), model, DATA)
    (tmp_path / "test/checkpoints").mkdir(parents=True)
    (tmp_path / "test/checkpoints/last.ckpt").write_bytes(b"x")  # will be replaced
    preflight.before_run(spec(), model, DATA)


def test_a_name_that_stays_unknown(spec, torchrun):
    torchrun(RANK="3", MASTER_ADDR="node-0.invalid")
    told = (
        r"rank 3: MASTER_ADDR=node-0.invalid: no route to node-0.invalid after 0.1 s "
        r"\(.*subdomain.*timeout_s="
    )
    with pytest.raises(MachineError, match=told):
        meeting.find_rank_zero(0.1)


def test_with_several_nodes_the_interface_is_chosen_unless_the_user_did(torchrun, monkeypatch):
    chosen = {"GLOO_SOCKET_IFNAME": "eth7"}
    variables = dict(chosen)
    monkeypatch.setattr(environment, "set_variable", variables.__setitem__)
    monkeypatch.setattr(network, "wait_for", lambda name, timeout_s: (name, "10.0.0.2"))
    monkeypatch.setattr(network, "interface_with", {"10.0.0.2": "eth1"}.get)
    torchrun(MASTER_ADDR="10.0.0.1", GROUP_WORLD_SIZE="1", **chosen)
    meeting.find_rank_zero(300)
    assert variables == chosen  # one node: left alone
    torchrun(GROUP_WORLD_SIZE="2")
    assert meeting.find_rank_zero(300) == "10.0.0.1 is 10.0.0.1, reached through eth1"
    assert variables == {**chosen, "NCCL_SOCKET_IFNAME": "=eth1"}


def test_an_interface_that_this_machine_does_not_have_is_named(torchrun, monkeypatch):
    """A variable of another machine; gloo only says twice that it finds no address."""
    monkeypatch.setattr(preflight, "interfaces", lambda: ["eth0", "lo"])
    torchrun(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="eth7")
    said = r"^GLOO_SOCKET_IFNAME=eth7: names no network interface of .*, which has eth0, lo; unset"
    with pytest.raises(ConfigError, match=said):
        preflight.before_meeting("cpu")
    # NCCL is for GPUs only.
    torchrun(GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="ib0")
    preflight.before_meeting("cpu")
    with pytest.raises(ConfigError, match=r"^NCCL_SOCKET_IFNAME=ib0: "):
        preflight.check_chosen_interfaces(uses_nccl=True)


def test_interfaces_are_those_with_an_address():
    found = preflight.interfaces()
    assert "lo" in found
    assert set(found) <= {name for _, name in socket.if_nameindex()}


def test_an_interface_is_not_rejected_where_addresses_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
):
    """As on macOS, which has other requests than Linux."""
    monkeypatch.setattr(network, "SIOCGIFADDR", 0)
    monkeypatch.setattr(preflight, "Path", lambda path: Path("/nowhere"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    preflight.check_chosen_interfaces(uses_nccl=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "en9")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=en9: names no network interface"):
        preflight.check_chosen_interfaces(uses_nccl=False)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("eth", ["eth0", "eth01"]),
        ("=eth0", ["eth0"]),
        ("ib,lo", ["ib0", "lo"]),
        ("^lo", ["eth0", "eth01", "ib0"]),
        ("^=eth0", ["eth01", "ib0", "lo"]),
    ],
)
def test_nccl_takes_prefixes_and_exceptions(given: str, taken: list[str]):
    names = ["eth0", "eth01", "ib0", "lo"]
    assert [name for name in names if preflight.nccl_takes(name, given)] == taken


@pytest.mark.parametrize(("shared", "said"), [(True, ""), (False, preflight.NOT_SHARED)])
def test_nodes_that_do_not_share_the_run_directory_are_told_in_one_line(
    spec, model, torchrun, monkeypatch, capsys, shared: bool, said: str
):
    torchrun(GROUP_WORLD_SIZE="2")
    monkeypatch.setattr(preflight, "is_shared", lambda run_dir: shared)
    preflight.before_run(spec(), model, DATA)
    assert capsys.readouterr().out.strip() == f"Preflight: {said}" * bool(said)


def test_what_differs_between_ranks_is_named(spec):
    def of(*, root: str = "a", epochs: int = 2, workers: int = 0) -> dict[str, str]:
        data = {"num_workers": workers}
        config = {"run_root": root, "trainer": {"max_epochs": epochs}, "data": data}
        return identity(spec(config=config))

    first = of()
    assert compare(of(root="b", workers=4), first).result == "ok"
    finding = compare(of(epochs=3), first)
    assert finding.fact == "1 differences: trainer.max_epochs=3, rank 0 has 2"
    assert "device=cuda, rank 0 has cpu" in compare(first | {"device": "cuda"}, first).fact
    absent = compare({"torch": first["torch"]}, first)
    assert absent.fact.count("rank 0 has") == len(first) - 1 == 2


def test_the_compared_code_is_that_of_the_user_and_of_samestep(model):
    values = preflight.hash_code(model, DATA)
    package = __name__.partition(".")[0]
    assert "samestep/plugins/preflight.py" in values
    assert any(name.endswith("tests/kit.py") for name in values)
    # Also where samestep is installed: DATA is Lightning's, which lies beside it then.
    assert {file.partition("/")[0] for file in values} == {package, "samestep"}


def test_of_a_script_only_its_own_file_is_compared(tmp_path: Path, monkeypatch):
    (tmp_path / "script.py").write_text("class Net: ...\n")
    (tmp_path / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    values = preflight.hash_code(importlib.import_module("script").Net(), 3)
    assert {file.partition("/")[0] for file in values} == {"samestep", "script.py"}


def test_what_an_editor_leaves_beside_the_code_is_not_compared(tmp_path: Path, monkeypatch):
    package = tmp_path / "edited"
    package.mkdir()
    (package / "__init__.py").write_text("class Net: ...\n")
    (package / ".#net.py").symlink_to("me@host.1234:1")
    (package / "folder.py").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    values = preflight.hash_code(importlib.import_module("edited").Net())
    assert [file for file in values if "samestep" not in file] == ["edited/__init__.py"]


def test_ranks_that_do_not_answer(spec, model, monkeypatch):
    def time_out(everyone: list, mine: object, group: None) -> None:
        raise RuntimeError("Timed out waiting 300000ms")

    monkeypatch.setattr(collectives, "num_ranks", lambda: 2)
    monkeypatch.setattr(collectives, "cpu_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", time_out)
    with pytest.raises(MachineError, match=r"rank 0: .*do not answer \(Timed out.*IFNAME"):
        inspect(spec(), model, DATA)


TORCHRUN = ["-m", "torch.distributed.run"]
RANK = """
import sys
import net
from samestep.plugins import preflight
from samestep.ranks import meeting, process_group
from samestep.plugins import preflight
from library.tests.kit import make_spec

folder, timeout_s, devices, *differences = sys.argv[1:]
print(meeting.find_rank_zero(float(timeout_s)))
process_group.init("cpu", float(timeout_s))
with process_group.shared_errors():
    spec = make_spec(folder / net.Path("run"), devices=int(devices), config=net.CONFIG)
    for finding in preflight.inspect(spec, net.Net(), None):
        process_group.on_rank_zero(print, finding.result, *finding, flush=True)
"""
NET = """
import os
from pathlib import Path
from library.tests import kit
class Net(kit.Net): ...
CONFIG = {"model": {"width": %s}}
"""


@pytest.mark.program
def test_two_ranks_with_other_configuration_and_code(tmp_path: Path):
    (tmp_path / "rank.py").write_text(RANK)
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "net.py").write_text(NET % rank)
    each = "import os, sys; sys.path.insert(0, f'{sys.path[0]}/{os.environ[\"RANK\"]}')\n"
    (tmp_path / "rank.py").write_text(each + RANK)
    result = run_ranks(str(tmp_path / "rank.py"), str(tmp_path), "400", "3")
    failed = [line for line in result.stdout.splitlines() if line.startswith("failed")]
    assert len(failed) == 2, result.stdout + result.stderr
    assert "rank 0, 1: ranks: 2, nodes: 1 devices=3 x" in failed[0]
    assert "rank 1: 2 differences: model.width=1, rank 0 has 0; net.py=" in failed[1]


NAMESPACES = [f"preflight-{os.getpid()}-{node}" for node in (0, 1)]


@pytest.fixture
def two_nodes():
    """Network namespaces joined by ``fabric0``, each with another interface that leads nowhere."""
    commands = [f"ip netns add {name}" for name in NAMESPACES]
    commands.append(
        f"ip link add fabric0 netns {NAMESPACES[0]} type veth peer fabric0 netns {NAMESPACES[1]}"
    )
    for node, name in enumerate(NAMESPACES):
        commands += [
            f"ip -n {name} link add another0 type veth peer another1",
            f"ip -n {name} addr add 10.98.0.{node + 1}/24 dev another0",
            f"ip -n {name} addr add 10.99.0.{node + 1}/24 dev fabric0",
            *(f"ip -n {name} link set {link} up" for link in ("lo", "another0", "fabric0")),
        ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.program
@pytest.mark.skipif(bool(why := pods.why_not()), reason=why)
def test_two_nodes_meet_through_the_interface_that_joins_them(two_nodes, tmp_path: Path):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "net.py").write_text(NET % 0)
    words = [str(tmp_path / "rank.py"), str(tmp_path), "400", "1"]
    host = socket.gethostname()
    shutil.copy("/etc/hosts", tmp_path / f"hosts-{host}")
    shutil.copy("/etc/resolv.conf", tmp_path / "resolv")
    nodes = [
        subprocess.Popen(
            [sys.executable, pods.ENTER, name, host, str(tmp_path), sys.executable, *TORCHRUN,
             "--nnodes=2", f"--node-rank={node}", "--master-addr=10.99.0.1", *words],
            env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, name in enumerate(NAMESPACES)
    ]  # fmt: skip
    said, other = (process.communicate(timeout=PATIENCE_S)[0] for process in nodes)
    assert [process.returncode for process in nodes] == [0, 0], said + other
    assert "10.99.0.1 is 10.99.0.1, reached through fabric0" in said
