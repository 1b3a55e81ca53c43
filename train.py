"""Train and test one model: the doorway to ``project.train``.

python train.py                                     # handwritten digits on this machine
python train.py data=cifar10 model=resnet18
python train.py trainer.devices=2                   # two processes, with or without GPUs
python train.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "src"))

from samestep.ranks import process  # src is on the path only now


def main() -> int:
    """Import the program and run it: the import takes long enough for a Ctrl-C."""
    from project.train import main as train

    return train()


if __name__ == "__main__":
    process.run(main, interrupt_at_once=True)
