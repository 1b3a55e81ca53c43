"""Fetch and verify a data set: python scripts/prepare_data.py data=cifar10 [data.root=DIR]."""

import argparse
from pathlib import Path

from samestep.config.compose import check
from samestep.errors import ConfigError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fetch a data set, for runs that may not.")
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="such as data=cifar10")
    try:
        data = check(parser.parse_args().overrides).data
        from samestep.build import build  # imports torch, which takes seconds
        from samestep.data.download import DataError

        source, root = build(data.source, "data.source"), Path(data.root)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")
    try:
        source.prepare(root, download=True, mirror=data.mirror)
        train, test = (len(source.load(root, train=train).labels) for train in (True, False))
    except DataError as error:
        parser.exit(1, f"{error}\n")
    print(f"{train} training and {test} test images are ready, data.root={root.resolve()}")
