"""Copy a run to a store, except checkpoints that it has already.

samestep upload runs/mine
samestep upload runs/mine --url s3://bucket/runs

The credentials of the store come from the environment.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks import failure
from samestep.ranks.secrets import redact
from samestep.run.changes import read_config


def main(argv: Sequence[str]) -> int:
    """Copy the run. Files that cannot be copied are named on stderr, with exit code 1."""
    parser = Parser("samestep upload", __doc__)
    parser.add_run_dir()
    text = "the store; default: the one that the run was copied to"
    parser.add_argument("--url", metavar="URL", help=text)
    arguments = parser.parse(argv)
    url = arguments.url or find_store(arguments.run_dir)
    if not url:
        raise ConfigError("the run has no store; name one, such as --url s3://bucket/runs")
    # Not at the top: fsspec takes longer to import than an invalid argument to report.
    from samestep.run.store import RunCopy

    store = RunCopy(url, arguments.run_dir)
    exit_code = 0
    for name in store.names():
        try:
            store.upload(name)
        except Exception as error:
            print(redact(f"error: {name}: {type(error).__name__} {error}"), file=sys.stderr)
            exit_code = failure.EXIT_ERROR
    if exit_code == 0:
        print(redact(f"Uploaded: {store.url}"))
    return exit_code


def find_store(run_dir: Path) -> str | None:
    """The store to which the configuration of a run copies it; None if there is none."""
    callbacks = read_config(run_dir).get("callbacks") or {}
    for node in callbacks.values():
        # Found by its arguments, not by its class: the user may have another one, and a foreign
        # config.yaml may name any class, so nothing of it is imported.
        if {"url", "flush_timeout_s"} <= set(node) and node["url"]:
            return str(node["url"])
    return None
