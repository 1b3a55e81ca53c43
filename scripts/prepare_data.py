"""Download and verify a data set. It takes the same overrides as train.py.

python scripts/prepare_data.py data=NAME
python scripts/prepare_data.py data=NAME data.root=/volume/data
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import options

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.ranks import failure


def main(argv: Sequence[str]) -> int:
    """Prepare the data, read them once, and print how many there are. Returns 0."""
    parser = Parser("prepare_data.py", __doc__)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="such as data=NAME")
    cfg = check(parser.parse(argv).overrides)
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
    print(f"{train} training and {test} test samples are ready, data.root={root.resolve()}")
    return 0


if __name__ == "__main__":
    # In a container this is process 1, for which SIGTERM does nothing unless there is a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(failure.EXIT_SIGTERM))
    options.run(main)
