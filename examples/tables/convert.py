"""Convert data into Lance tables, for data=lance or for samestep's LanceRows.

python -m examples.tables.convert photos data/photos        # train/<class>/*.jpg and
                                                         # test/<class>/*.jpg
python -m examples.tables.convert photos s3://bucket/photos --val 0.05
python -m examples.tables.convert hub data/photos        # a clone of a dataset on the Hugging Face
                                                         # Hub, or what save_to_disk has written
python -m examples.tables.convert table.parquet data/table.lance    # any columns

Each piece is read back and compared. The same command resumes a conversion that was stopped.
"""

from collections.abc import Sequence
from pathlib import Path

from samestep import ConfigError, Parser, run_script


def main(argv: Sequence[str]) -> int:
    """Write the tables, and print how many rows each has. Returns 0."""
    parser = Parser("python -m examples.tables.convert", __doc__)
    parser.add_argument("source", type=Path, help="folder of images, Parquet, or datasets")
    parser.add_argument("target", help="folder, or s3://bucket/folder; a table ends with .lance")
    fraction = "fraction of the training images, 0.1 unless given"
    parser.add_argument("--val", type=float, default=0.1, metavar="FRACTION", help=fraction)
    chosen = parser.parse(argv)
    if not 0 <= chosen.val < 1:
        raise ConfigError(f"--val {chosen.val}: must be at least 0 and below 1, such as 0.1")
    try:
        from examples.tables.writer import convert
    except ModuleNotFoundError as error:
        if error.name not in ("lance", "pyarrow"):
            raise
        raise ConfigError("Lance is not installed: .venv/bin/pip install pylance") from None
    for uri, num_rows in convert(chosen.source, chosen.target.rstrip("/"), chosen.val):
        print(f"{uri}: {num_rows} rows, read back and compared")
    return 0


if __name__ == "__main__":
    run_script(main)
