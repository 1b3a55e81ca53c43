"""Download and verify a data set. It takes the same overrides as train.py.

python scripts/prepare_data.py data=NAME
python scripts/prepare_data.py data=NAME data.root=/volume/data
"""

from collections.abc import Sequence
from pathlib import Path

from hydra.utils import instantiate

from samestep import ConfigError, Parser, compose_run, run_script


def main(argv: Sequence[str]) -> int:
    """Prepare the data, read them once, and print how many there are. Returns 0."""
    parser = Parser("prepare_data.py", __doc__)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="such as data=NAME")
    cfg = compose_run(parser.parse(argv).overrides)
    data = cfg.data
    if "source" not in data:
        raise ConfigError(
            f"data={cfg.choices.data}: has no data.source, so this script cannot prepare it; "
            "its DataModule does, by prepare_data()"
        )
    # The project imports torch, which takes seconds: invalid arguments are reported before.
    source = instantiate(data.source, _convert_="all")
    root = Path(data.root)
    source.prepare(root, download=True, mirror=data.mirror)
    train = len(source.load(root, train=True).labels)
    test = len(source.load(root, train=False).labels)
    print(f"{train} training and {test} test samples are ready, data.root={root.resolve()}")
    return 0


if __name__ == "__main__":
    run_script(main)
