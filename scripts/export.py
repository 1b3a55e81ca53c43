"""Write the net of a run as safetensors and as a torch.export program, and check them.

python scripts/export.py run=runs/digits-cnn-3f2a1b
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from project.options import run_script


def main(*arguments: Any) -> int:
    """Import torch once the words are checked."""
    from project.export import main

    return main(*arguments)


if __name__ == "__main__":
    sys.exit(run_script("export", __doc__, main))
