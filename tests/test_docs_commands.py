"""Every command that README.md and docs/ print, as printed: executed, or rendered and checked.

``train.py`` is composed and checked by tests/test_docs.py, ``samestep launch`` is rendered and
checked here, and the programs of Swarm and elastic pods run in
tests/samestep/launch/test_printed_commands.py. ELSEWHERE says why the others do not run here.
"""

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from examples.language.tests.conftest import TEXT
from samestep.grid.jobs import Job, write_jobs
from samestep.hydra.compose import check
from samestep.launch import check as rules
from samestep.launch import main, render, submissions
from samestep.sweep import settings
from tests.conftest import NO_PICTURES, ROOT, run
from tests.printed_commands import PAGES, Command, find_commands

HERE = (
    "train.py", "scripts/prepare_data.py", "samestep doctor", "samestep sweep", "samestep launch",
    "samestep status", "samestep logs", "samestep cancel",
)  # fmt: skip
WITH_A_RUN = (
    "samestep evaluate", "samestep predict", "samestep export", "samestep compare",
    "samestep report", "samestep runs", "samestep upload",
)  # fmt: skip
ELSEWHERE = {  # pattern of a command: where it is executed, or why not at all
    r"uvx copier ": "tests/test_copies.py",
    r"samestep verify ": "the tests of the library, test_verify.py; test_verify_of_template.py",
    r"wandb sync ": "the tests of the library, test_loggers.py",
    r"tensorboard --logdir": "tests/project/test_trackers.py, and the library's tests",
    r"-m examples.tables.convert ": "examples/tables/tests/test_writer.py",
    r"-m examples.language.convert ": "examples/language/tests/test_tokens.py",
    r"export AWS_|pip install .project\[lance": "tests/examples/test_tables.py",
    r"labs/servers/build.sh|labs.servers ": ".github/workflows/servers.yml",
    r"labs.e2e": ".github/workflows/e2e.yml",
    r"git commit ": "before an update",
    r"pyflyte run ": "tests/scripts/test_flyte.py",
    r"docker build|docker push": "tests/test_image.py",
    r"docker run .*IMAGE": "tests/image_build.sh",
    r"docker (swarm|node|secret) ": "needs a swarm; seen on Docker 20.10: docs/clusters/swarm.md",
    r"docker compose ": "from the guide, not seen: docs/clusters/swarm.md",
    r"python -m http.server": "tests/samestep/launch/test_swarm.py",
    r"python -m samestep.launch.entrypoint": "tests/samestep/launch/test_entrypoint.py",
    r"kubectl get trainjob ": "tests/labs/servers/test_progress.py reads the same field",
    r"kubectl (create|apply|taint|delete) |kind |sudo install ": "needs a cluster or a server",
    r"source$|samestep completion": "tests/test_completion.py",
    r"git clone |scripts/new.py": "tests/test_start.py",
    r"printf ": "the Dockerfile of Flyte's image, for docker build",
}
NOT_COMMANDS = {  # first words of blocks that show something else
    ("README.md", "Run:"), ("README.md", "train.py"), ("README.md", "runs/<run_id>/"),
    ("README.md", "undisturbed"),
    ("docs/clusters/entrypoint.md", "entrypoint:"),
    ("docs/data.md", "pets/cat/*.jpg"), ("docs/reference.md", "options:"),
    ("docs/report.md", "Note:"),
}  # fmt: skip
STAND_INS = {"$IMAGE": "ghcr.io/me/project:3f2a1b4c5d6e", "$seed": "0"}
OWN_FILES = ROOT / "docs/tasks.md"  # tests/test_tasks.py executes it
BLOCKS = [block for page in PAGES if page != OWN_FILES for block in find_commands(page) if block]
COMMANDS = [
    command
    for block in BLOCKS
    if (block[0].page, block[0].words[0]) not in NOT_COMMANDS
    for command in block
]


def of_program(*programs: str):
    """The commands of these programs, each once."""
    found = {command.text: command for command in COMMANDS if command.program in programs}
    return pytest.mark.parametrize("command", found.values(), ids=found.keys())


def arguments_of(command: Command) -> list[str]:
    text = "\n".join(command.arguments)
    for name, value in STAND_INS.items():
        text = text.replace(name, value)
    return text.split("\n") if text else []


def test_every_command_is_executed_or_has_a_reason():
    unknown, used = [], set()
    for command in COMMANDS:
        if command.program in (*HERE, *WITH_A_RUN, "make", "pip"):
            continue
        reasons = {pattern for pattern in ELSEWHERE if re.search(pattern, command.text)}
        used |= reasons
        if not reasons:
            unknown.append(f"{command.page}: {command.text}")
    assert unknown == []
    assert ELSEWHERE.keys() - used == set()
    for reason in ELSEWHERE.values():
        for path in re.findall(r"(?:tests|docs|examples)/[\w/.]+\w", reason):
            assert (ROOT / path).is_file(), path
    first_words = {(block[0].page, block[0].words[0]) for block in BLOCKS}
    assert first_words >= NOT_COMMANDS


def numbers_of_ranks(cfg) -> list[int]:
    """How many ranks a run may have: as many as it gets, if its nodes come and go."""
    cluster, devices = cfg.cluster, cfg.trainer.devices
    if "devices_per_node" in cluster:
        return [sum(cluster.devices_per_node)]
    if "max_nodes" in cluster:
        return [devices * nodes for nodes in range(cluster.min_nodes, cluster.max_nodes + 1)]
    return [devices * cfg.trainer.num_nodes]


@of_program("samestep launch")
def test_what_is_launched_has_no_errors(command: Command, monkeypatch: pytest.MonkeyPatch):
    words = arguments_of(command)
    overrides = [word for word in words if not word.startswith("--")]
    flags = set(words) - set(overrides)
    assert flags <= {f"--{flag}" for flag in main.FLAGS}
    monkeypatch.setenv("RUN_ID", command.variables.get("RUN_ID", ""))
    cfg, documents = main.prepare(overrides, is_data="--data" in flags)
    assert list(rules.faults(cfg, documents)) == []
    if flags <= {"--data"}:
        assert list(rules.check_examples(cfg)) == []
    for number in numbers_of_ranks(cfg):
        assert cfg.data.global_batch_size >= number, f"{number} ranks"
    if "commands" in cfg.cluster:
        assert render.command(cfg, overrides, "submit")


@of_program(*(f"samestep {name}" for name in main.COMMANDS))
def test_what_is_done_with_a_run_names_it_and_at_most_its_cluster(command: Command):
    name, *overrides = arguments_of(command)
    assert "=" not in name
    if overrides:
        assert submissions.cluster_of(overrides)
        check(overrides)


@of_program("samestep sweep")
def test_a_search_is_right_as_printed(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUN_ID", command.variables.get("RUN_ID", ""))
    words = arguments_of(command)
    chosen = [word.removeprefix("sweep=") for word in words if word.startswith("sweep=")]
    search = settings.read(words)
    assert search.name == (command.variables.get("RUN_ID") or chosen[0].replace("_", "-"))


@of_program("scripts/prepare_data.py")
def test_the_data_that_are_prepared_are_a_choice(command: Command):
    assert check(arguments_of(command)).data.source.files


def find_targets(folder: Path) -> list[str]:
    return re.findall(r"^(\w+):.*##", (folder / "Makefile").read_text(), re.M)


def test_targets_of_make_and_extras_of_pip_exist():
    targets = {folder: find_targets(ROOT / folder) for folder in (".", "labs")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [command for command in COMMANDS if command.program in ("make", "pip")]
    for command in found:
        if command.program == "make":
            in_labs = command.words[1:3] == ["-C", "labs"]
            folder, target = ("labs", command.words[3]) if in_labs else (".", command.words[1])
            assert target in targets[folder], command.text
        else:
            _, _, extra = command.words[-1].rstrip("]").partition("[")
            assert command.words == ["pip", "install", f"{project['name']}[{extra}]"]
            assert extra in project["optional-dependencies"]
    assert {command.program for command in found} == {"make", "pip"}


@pytest.fixture(scope="module")
def place(
    digits_run: Path, shared_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with what the commands name: runs, an image, and a folder of images."""
    folder = tmp_path_factory.mktemp("reader")
    names = ["mine", "cnn", "squeeze", "ranks-1", "ranks-1-0", "ranks-2-0"]
    for name in [*names, "digits-0", "digits-1", "lr/lr-0", "lr/lr-1"]:
        shutil.copytree(digits_run, folder / "runs" / name)
    for grid in ("lr", "mine"):
        (folder / "runs/grids" / grid).mkdir(parents=True)
        jobs = [Job(name, Path(), [], {"seed": name[-1]}, "") for name in ("digits-0", "digits-1")]
        write_jobs(folder / "runs/grids" / grid, jobs)
    shutil.copytree(shared_run("text", *TEXT, is_recorded=True), folder / "runs" / "book")
    (folder / "photos").mkdir()
    for name in ("seven.png", "photos/a.png"):
        Image.new("L", (8, 8), 128).save(folder / name)
    return folder


@of_program(*WITH_A_RUN)
def test_a_run_is_used_as_printed(command: Command, place: Path):
    if "--serve" in command.words:
        pytest.skip("never ends: library/tests/report/test_live.py")
    if command.arguments[1:] == ["--onnx"]:
        pytest.skip("tests/project/test_skeleton.py")
    words = [word.replace("<id>", "mine") for word in arguments_of(command)]
    words = [word.replace("<other>", "ranks-1").replace("<sweep>", "lr") for word in words]
    words = [word.replace("/volume/", f"{place}/") for word in words]
    words = [word.replace("s3://bucket", f"file://{place}/store") for word in words]
    # As a shell does.
    globs = {word: sorted(map(str, place.glob(word))) for word in words if "*" in word}
    words = [found for word in words for found in globs.get(word, [word])]
    is_script = command.program.endswith(".py")
    program = [str(ROOT / command.program)] if is_script else ["-m", *command.program.split()]
    # The runs lie elsewhere, the project here.
    done = run(*program, *words, cwd=place, SAMESTEP_PROJECT=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout


FEW = (  # modes and experiments: tests/samestep/with_template/test_modes.py
    "train.py +model.optimizer.amsgrad=true ~callbacks.predictions",
)


@pytest.mark.parametrize("line", FEW)
def test_a_few_runs_train_as_printed_but_not_for_long(line: str, tmp_path: Path):
    printed = {" ".join([command.program, *command.arguments]): command for command in COMMANDS}
    command = printed[line]
    quick = ["trainer.max_epochs=1", "trainer.accelerator=cpu", "report=false"]
    quick += [f"run_root={tmp_path}", *([] if NO_PICTURES in line else [NO_PICTURES])]
    done = run(command.program, *arguments_of(command), *quick, RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    assert "Finished" in done.stdout


@of_program("samestep doctor")
def test_the_doctor_examines_as_printed(command: Command, tmp_path: Path):
    words = ["-m", *command.words]
    if command.words[0] == "torchrun":
        words = ["-m", "torch.distributed.run", *command.words[1:]]
    done = run(*words, "trainer.accelerator=cpu", f"run_root={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data" in done.stdout
