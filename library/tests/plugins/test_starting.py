"""What a Trainer that starts ranks runs in them, and what becomes of its own process."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from library.tests.programs import environment, run
from samestep.plugins import starting

PROGRAM = """
import json, sys
from samestep.errors import ConfigError
from samestep.plugins import starting

def main():
    try:
        print(json.dumps([__package__ or "", sys.flags.optimize, sys.argv[1:]]))
        print(json.dumps(starting.this_program()))
    except ConfigError as error:
        print(json.dumps(str(error)))

if __name__ == "__main__":
    main()
"""
COMMANDS = [  # of Python, whose ranks run the same program
    "script.py a b",
    "-O -W ignore script.py a",
    "-m cProfile -o prof script.py a b",
    "-m trace --count --coverdir=cover script.py a",
    "-m trace --trackcalls --module package.module a",
    "-m cProfile -o prof -m package.module a",
    "-m pdb -c continue script.py a",
    "-m pdb -c continue -m package.module a",
    "-m package.module a",
    "-m package a",
    "package/__main__.py a",
    "package a",
    "package.zip a",
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "package").mkdir()
    for name in ("script.py", "package/__init__.py", "package/module.py", "package/__main__.py"):
        (folder / name).write_text("" if name.endswith("__init__.py") else PROGRAM)
    with zipfile.ZipFile(folder / "package.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return folder


@pytest.mark.program
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_run_the_same_program(programs: Path, command: str):
    done = run(*command.split(), cwd=programs)
    # A debugger and a profiler print lines of their own.
    printed = [line for line in done.stdout.splitlines() if line.startswith("[")]
    start, program = map(json.loads, printed[:2])
    again = run(*program, cwd=programs)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[0]) == start


@pytest.mark.program
@pytest.mark.parametrize("words", [["-"], ["-c", "import script; script.main()"]])
def test_a_program_without_a_file_cannot_be_run_again(programs: Path, words: list[str]):
    done = subprocess.run(
        [sys.executable, *words], input="import script; script.main()", cwd=programs,
        env=environment(), text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert "it is a notebook, python -c or stdin; save it as a script" in done.stdout


@pytest.mark.program
def test_a_trainer_in_a_thread_finds_its_program(programs: Path):
    code = "import threading, script\nthreading.Thread(target=script.main).start()\n"
    (programs / "threaded.py").write_text(code)
    done = run("threaded.py", "a", cwd=programs)
    assert json.loads(done.stdout.splitlines()[1]) == [str(programs / "threaded.py"), "a"]


BECOMES_AGENT = """
import atexit, os, sys, time
from pathlib import Path
from samestep.plugins import starting

if "RANK" in os.environ:
    facts = [os.getppid(), sys.flags.optimize, sys.argv[1:], os.environ["RUN_ID"], os.getcwd()]
    Path(os.environ["RANK"]).write_text(repr(facts))
    while not (Path("0").exists() and Path("1").exists()):
        time.sleep(0.01)
    sys.exit(int(sys.argv[1]))
atexit.register(print, "not here")
Path("folder").mkdir()
os.chdir("folder")
# The agent imports what the script would: nothing of the current folder.
Path("torch.py").write_text("raise ImportError")
file = open("kept", "w")
file.write("before the agent")
print("buffered")
try:
    starting.become_agent(starting.this_program(), 2, run_id="mine")
finally:
    print("not here")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripts/script.py"
    path.parent.mkdir()
    path.write_text(BECOMES_AGENT)
    return path


@pytest.mark.program
@pytest.mark.parametrize("code", [0, 5])
@pytest.mark.parametrize("options", [[], ["-O", "-X", "utf8"]], ids=["forked", "fresh"])
def test_the_process_of_a_script_becomes_the_agent(
    tmp_path: Path, script: Path, options: list[str], code: int
):
    first = subprocess.Popen(
        [sys.executable, *options, str(script), str(code)], cwd=tmp_path, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = first.communicate()
    assert first.returncode == code, err
    assert out == "buffered\n"
    assert ("ended with exit code 5 and without a message" in err) == (code == 5)
    folder = tmp_path / "folder"
    assert (folder / "kept").read_text() == "before the agent"
    facts = [first.pid, len(options) // 2, [str(code)], "mine", str(folder)]
    for rank in ("0", "1"):
        assert (folder / rank).read_text() == repr(facts)


@pytest.mark.program
def test_a_prompt_continues_after_the_ranks(tmp_path: Path, script: Path):
    """As in IPython: ``%run script.py``."""
    done = subprocess.run(
        [sys.executable, "-i", str(script), "0"], input="print('prompt', os.getpid())\n",
        cwd=tmp_path, env=environment(), text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    prompt = int(done.stdout.split("prompt ")[1].split()[0])
    assert "not here" in done.stdout
    assert not (tmp_path / "folder/0").read_text().startswith(f"[{prompt},")


def test_an_interrupt_leaves_the_agent_time_to_save():
    """It has got the Ctrl-C too: at a prompt this process waits for its exit code."""
    answers = [KeyboardInterrupt(), KeyboardInterrupt(), 130]

    class Agent:
        def wait(self) -> int:
            answer = answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

    with pytest.raises(SystemExit, match="130"):
        starting.wait_for_agent(Agent())  # type: ignore[arg-type]


def test_files_are_written_before_the_process_is_replaced(tmp_path: Path):
    with (
        (tmp_path / "text").open("w") as text,
        (tmp_path / "binary").open("wb") as binary,
        (tmp_path / "both").open("w+b") as both,
        (tmp_path / "closed").open("w") as closed,
    ):
        closed.close()
        text.write("x")
        binary.write(b"x")
        both.write(b"x")
        starting.flush_files()
        sizes = [(tmp_path / name).stat().st_size for name in ("text", "binary", "both")]
    assert sizes == [1, 1, 1]
