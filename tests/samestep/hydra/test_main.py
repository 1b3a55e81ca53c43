"""Hydra's own parser, with what argparse of Python 3.14 asks of a help text."""

import argparse

import pytest
from hydra._internal.utils import get_args_parser

from library.tests.programs import run
from samestep.hydra.main import help_as_text

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
