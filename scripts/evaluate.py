"""Test or validate the model of a run again.

python scripts/evaluate.py run=runs/digits-cnn-3f2a1b
python scripts/evaluate.py run=runs/digits-cnn-3f2a1b split=val format=json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from project.options import run_script

if __name__ == "__main__":
    sys.exit(run_script("evaluate", __doc__))
