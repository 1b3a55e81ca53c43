"""Copy a run to a store again: what is missing there, or differs.

python scripts/upload.py run=runs/digits-cnn-3f2a1b url=s3://bucket/runs

Without url= it goes where the run was copied to. Keys of the store come from the environment.
"""

import sys
from pathlib import Path

from options import options

from samestep.errors import ConfigError
from samestep.ranks.secrets import redacted
from samestep.run.directory import saved


def main() -> int:
    """Read the command line, and copy.

    Returns:
        0 copied; 1 something could not be, each on a line of stderr; 2 after wrong usage.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    from samestep.run.artifacts import RunCopy  # imports lightning

    try:
        values = options(sys.argv[1:], {"run": None, "url": None}, files=False)
        run_dir = Path(values["run"])
        url = values["url"] or saved(run_dir).callbacks.get("artifacts", {}).get("url")
        if not url:
            raise ConfigError("url=: the run names none; it is such as url=s3://bucket/runs")
        mirror = RunCopy(url, run_dir)
    except ConfigError as error:
        print(f"error: {redacted(str(error))}", file=sys.stderr)
        return 2
    failed = False
    for name in mirror.names():
        try:
            mirror.upload(name)
        except Exception as error:  # a store's own
            failed = True
            print(redacted(f"error: {name}: {type(error).__name__} {error}"), file=sys.stderr)
    if not failed:
        print(redacted(f"Uploaded: {mirror.url}"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
