"""Train and test one model: see src/project/train.py.

python train.py                                     # the default run, on this machine
python train.py trainer.max_epochs=5 seed=1         # other values
python train.py trainer.devices=2                   # two processes, with or without GPUs
python train.py --help
"""

import sys
from pathlib import Path

if not (3, 11) <= sys.version_info[:2] < (3, 15):
    print("error: needs Python 3.11 to 3.14; " + sys.executable + " is another", file=sys.stderr)
    sys.exit(2)
sys.path.insert(0, str(Path(__file__).parent / "src"))


def load_train():
    """Import the function that trains."""
    from project.train import train

    return train


if __name__ == "__main__":
    try:
        from samestep.hydra.program import run_program

        run_program(load_train)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("project"):
            raise
        text = f"error: {sys.executable} has no package {error.name}; use .venv/bin/python"
        print(f"{text}, which `make train` installs", file=sys.stderr)
        sys.exit(2)
