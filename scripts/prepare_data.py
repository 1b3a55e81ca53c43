"""Download and verify a data set. It takes the same overrides as train.py.

python scripts/prepare_data.py data=NAME
python scripts/prepare_data.py data=NAME data.root=/volume/data
"""

from collections.abc import Sequence

from samestep import ConfigError, Parser, build_datamodule, compose_run, run_script


def main(argv: Sequence[str]) -> int:
    """Let the DataModule prepare and open its data, and print how many there are. Returns 0."""
    parser = Parser("prepare_data.py", __doc__)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="such as data=NAME")
    # data.download follows it, unless a data set has nothing to download.
    cfg = compose_run([*parser.parse(argv).overrides, "cluster.download=true"])
    # This imports torch, which takes seconds: invalid arguments are reported before.
    data = build_datamodule(cfg)
    if data is None:
        raise ConfigError("data=null: there is no DataModule to prepare data; add data=NAME")
    data.prepare_data()
    data.setup("fit")
    sets = vars(data)
    names = [n for n in ("train_set", "val_set", "test_set") if hasattr(sets.get(n), "__len__")]
    print(f"ready: data={cfg.choices.data}", *(f"{name}={len(sets[name])}" for name in names))
    return 0


if __name__ == "__main__":
    run_script(main)
