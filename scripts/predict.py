"""Name what is in image files, or in all images of directories.

python scripts/predict.py run=runs/digits-cnn-3f2a1b seven.png
python scripts/predict.py run=runs/digits-cnn-3f2a1b top=3 format=json photos/
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from project.options import run_script

if __name__ == "__main__":
    sys.exit(run_script("predict", __doc__))
