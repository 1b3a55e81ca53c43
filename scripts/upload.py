"""Copy a run to a store again: the files that the store does not have, or has in another version.

python scripts/upload.py runs/mine --url s3://bucket/runs

The keys of the store come from the environment.
"""

import argparse
import sys
from typing import Any

import options

from samestep.errors import ConfigError, RunError
from samestep.ranks import process
from samestep.ranks.secrets import redact


class UploadError(RunError):
    """The store cannot be reached, or refuses."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.make_parser(__doc__)
    parser.add_argument("--url", help="the store, if not the one that the run was copied to")
    return parser


def main(arguments: Any) -> int:
    """Copy, and name each file that could not be copied on a line of stderr.

    Returns:
        0, or 1 if a file could not be copied.
    """
    # It imports torch, which takes seconds: wrong usage is reported before.
    from samestep.run.changes import read_config
    from samestep.run.store import RunCopy

    url = arguments.url
    if url is None:
        callbacks = read_config(arguments.run_dir).get("callbacks") or {}
        # By its arguments: the run of somebody else may name any class, which is not imported.
        copies = [node for node in callbacks.values() if {"url", "flush_timeout_s"} <= set(node)]
        url = next((node["url"] for node in copies if node["url"]), None)
    if not url:
        raise ConfigError("the run names no store; name one, such as --url s3://bucket/runs")
    # Every kind of store has exceptions of its own: of ftplib, of botocore, of google.auth ...
    try:
        store = RunCopy(url, arguments.run_dir)
    except ConfigError:
        raise
    except Exception as error:
        raise UploadError(f"--url {url}: {type(error).__name__} {error}") from error
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


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
