"""Libraries on top of Lightning, where they are installed: killed, stopped and continued.

The rest of the tests needs none of them. ``docs/foreign.md`` says how to install them.
"""

from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from library.tests.on_top import PROGRAMS
from library.tests.programs import run

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_library_continues_with_the_same_bits(tmp_path: Path, name: str):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    _, killed, stopped = PROGRAMS[name]

    def train(run_dir: str, harm: str = "") -> CompletedProcess[str]:
        where = str(tmp_path / run_dir)
        return run(
            "-W", "ignore", "-m", "library.tests.on_top", name, where, cwd=tmp_path, HARM=harm
        )

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr
    assert train("parts", f"SIGKILL:{killed}").returncode == -9
    assert train("parts", f"SIGTERM:{stopped}").returncode == 143
    # The second time the run is finished, and the library goes on with its weights.
    for _ in range(2):
        again = train("parts")
        assert again.returncode == 0, again.stderr
        assert result_of(again) == result_of(whole)


def result_of(done: CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("result: ")]
    return line
