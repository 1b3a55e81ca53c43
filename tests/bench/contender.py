"""One contender, in this process: python -m tests.bench.contender MODULE FUNCTION WORDS..."""

import importlib
import os
import sys

import torch

from tests.bench.measure import say

if __name__ == "__main__":
    module, function, *words = sys.argv[1:]
    torch.set_num_threads(1)
    result = getattr(importlib.import_module(f"tests.bench.{module}"), function)(*words)
    if os.environ.get("RANK", "0") == "0":
        say(**result)
