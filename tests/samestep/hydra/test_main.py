"""The command line of train.py; Hydra's own parser, with what argparse of Python 3.14 asks."""

import argparse
import os
import re
import sys
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from library.tests.programs import run
from samestep.hydra.main import help_as_text, main
from samestep.run import lock

STRICT = """
import argparse

accept = argparse.ArgumentParser.add_argument

def add_argument(parser, *names, **options):
    action = accept(parser, *names, **options)
    try:
        "%" in (action.help or "")
    except TypeError as error:
        raise ValueError("badly formed help string") from error
    return action

argparse.ArgumentParser.add_argument = add_argument
"""


def test_the_owner_of_a_run_is_named_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """``train`` imports it."""

    def say() -> str:
        assert main(lambda cfg, overrides: print("imports")) == 0
        return capsys.readouterr().out

    words = ["train.py", f"run_root={tmp_path}", "trainer.accelerator=cpu", "trainer.devices=1"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("RUN_ID", "mine")
    assert say() == "imports\n"
    lock.acquire(tmp_path / "mine")
    owner = f"{tmp_path}/mine is in use by process {os.getpid()} on "
    assert re.fullmatch(f"Note: {re.escape(owner)}.*; this start waits .*\nimports\n", say())
    # The first rank may have locked it already.
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert say() == "imports\n"


def test_canary_a_help_of_hydra_is_no_text(monkeypatch: pytest.MonkeyPatch):
    """When it is, ``help_as_text`` can go."""
    parser = argparse.ArgumentParser
    monkeypatch.setattr(parser, "add_argument", parser.add_argument)  # undone at the end
    exec(STRICT, {})
    strict = parser.add_argument
    with pytest.raises(ValueError, match="badly formed help string"):
        get_args_parser()
    with help_as_text():
        text = get_args_parser().format_help()
    assert parser.add_argument is strict
    assert "Install or Uninstall shell completion:" in text


@pytest.mark.program
def test_hydra_starts_where_help_must_be_text():
    program = f"{STRICT}\nimport runpy; runpy.run_path('train.py', run_name='__main__')"
    done = run("-c", program, "--hydra-help")
    assert done.returncode == 0, done.stderr
    assert "--shell-completion,-sc : Install or Uninstall shell completion:" in done.stdout
