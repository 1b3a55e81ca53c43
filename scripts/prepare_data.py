"""Download and verify a data set. It takes the same overrides as train.py.

python scripts/prepare_data.py data=NAME
python scripts/prepare_data.py data=NAME data.root=/volume/data
"""

import argparse
import signal
import sys
from pathlib import Path

import options  # noqa: F401 (puts src on the path)

from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check
from samestep.ranks import failure, process


def main() -> int:
    """Prepare the data, read them once, and print how many there are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="such as data=NAME")
    overrides = parser.parse_args().overrides
    try:
        cfg = check(overrides)
        data = cfg.data
        if "source" not in data:
            raise ConfigError(
                f"data={cfg.choices.data}: has no data.source, so this script cannot prepare it; "
                "its DataModule does, by prepare_data()"
            )
        from samestep.hydra.build import build  # imports torch, which takes seconds

        source, root = build(data.source, "data.source"), Path(data.root)
        source.prepare(root, download=True, mirror=data.mirror)
        train, test = (len(source.load(root, train=train).labels) for train in (True, False))
    except (ConfigError, RunError) as error:
        return failure.report(error)
    print(f"{train} training and {test} test samples are ready, data.root={root.resolve()}")
    return 0


if __name__ == "__main__":
    # In a container this is process 1, for which SIGTERM does nothing unless there is a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(failure.EXIT_SIGTERM))
    process.run(main)
