"""Copy a run to a store again; of the checkpoints only what the store lacks.

samestep upload runs/mine
samestep upload runs/mine --url s3://bucket/runs

The credentials of the store come from the environment.
"""

import sys
from collections.abc import Sequence

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks.secrets import redact
from samestep.run.changes import read_config


def main(argv: Sequence[str]) -> int:
    """Copy; name each file that could not be copied on a line of stderr, and return 1 then."""
    parser = Parser("samestep upload", __doc__)
    parser.add_run_dir()
    parser.add_argument("--url", help="the store, if not the one that the run was copied to")
    arguments = parser.parse(argv)
    url = arguments.url
    if url is None:
        callbacks = read_config(arguments.run_dir).get("callbacks") or {}
        # By its arguments: the run of somebody else may name any class, which is not imported.
        copies = [node for node in callbacks.values() if {"url", "flush_timeout_s"} <= set(node)]
        url = next((node["url"] for node in copies if node["url"]), None)
    if not url:
        raise ConfigError("the run has no store; name one, such as --url s3://bucket/runs")
    from samestep.run.store import RunCopy  # imports fsspec, which invalid arguments do not need

    store = RunCopy(url, arguments.run_dir)
    failed = 0
    for name in store.names():
        try:
            store.upload(name)
        except Exception as error:
            print(redact(f"error: {name}: {type(error).__name__} {error}"), file=sys.stderr)
            failed += 1
    if not failed:
        print(redact(f"Uploaded: {store.url}"))
    return 1 if failed else 0
