"""One contender, in this process: python -m labs.bench.contender epochs:bare WORDS..."""

import os
import pkgutil
import sys

import torch

from labs.bench.measure import say

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    torch.set_num_threads(1)
    result = pkgutil.resolve_name(f"labs.bench.{name}")(*words)
    if os.environ.get("RANK", "0") == "0":
        say(**result)
