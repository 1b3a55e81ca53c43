"""docs/start.md, typed from its first command to its last, in a clone."""

import re
from pathlib import Path

import pytest

from tests.clone import clone_working_tree
from tests.conftest import ROOT
from tests.printed_commands import find_lines, make_quick, type_line

pytestmark = pytest.mark.nightly

NET = "src/project/nets/squeeze.py"


def test_the_first_ten_minutes(tmp_path: Path):
    clone = clone_working_tree(tmp_path / "project")
    make_quick(clone)
    lines = [line for block in find_lines(ROOT / "docs/start.md") for line, _ in block]
    # The clone is there, and tests/test_make.py installs.
    typed = [line for line in lines if not re.match("git clone |make train", line)]
    assert len(typed) >= 10
    for line in typed:
        done = type_line(line, clone)
        assert done.returncode == 0, (line, done.stderr)
        if "scripts/new.py" in line:
            assert NET in done.stdout
            net = (clone / NET).read_text()
            assert "nn.ReLU()" in net
            (clone / NET).write_text(net.replace("nn.ReLU()", "nn.SiLU()"))
    assert (clone / "runs/squeeze/report.html").is_file()
