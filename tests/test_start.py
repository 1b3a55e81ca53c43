"""docs/start.md, executed from its first command to its last, in a clone."""

from pathlib import Path

from tests.clone import clone_working_tree
from tests.conftest import NO_PICTURES, ROOT, run
from tests.printed_commands import find_commands

QUICK = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.accelerator=cpu"]
NET = "src/project/model/nets/squeeze.py"


def test_the_first_ten_minutes(tmp_path: Path):
    clone = clone_working_tree(tmp_path / "project")
    done = {}
    for command in (
        command for block in find_commands(ROOT / "docs/start.md") for command in block
    ):
        words = [*command.program.split(), *command.arguments]
        if words[0] in ("git", "cd"):
            continue
        if words == ["make", "train"]:  # tests/test_make.py installs
            words = ["train.py"]
        if words[0] == "train.py" and "--help" not in words:
            words += [*QUICK, NO_PICTURES]
        start = ["-m", *words] if words[0] == "samestep" else words
        result = run(*start, cwd=clone, **command.variables, PYTHONPATH=f"{clone}:{clone / 'src'}")
        assert result.returncode == 0, (command.text, result.stderr)
        done[command.text] = result.stdout
        if words[0] == "scripts/new.py":
            assert NET in result.stdout
            net = (clone / NET).read_text()
            assert "nn.ReLU()" in net
            (clone / NET).write_text(net.replace("nn.ReLU()", "nn.SiLU()"))
    assert len(done) >= 10
    assert (clone / "runs/squeeze/report.html").is_file()
