"""Start a model of your own: copy a net, its config and its test under a new name.

python scripts/new_model.py squeeze --from cnn
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from project.new_model import new_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Copy a net, its config and its test under a new name, ready to train.",
        epilog="example: python scripts/new_model.py squeeze --from cnn",
    )
    parser.add_argument("name", help="the new model, as in `python train.py model=NAME`")
    parser.add_argument("--from", dest="source", required=True, help="the model to copy, as in cnn")
    parser.add_argument("--dry-run", action="store_true", help="show the changes, write nothing")
    try:
        print(new_model(Path(__file__).resolve().parents[1], **vars(parser.parse_args())))
    except ValueError as error:
        parser.error(str(error))
