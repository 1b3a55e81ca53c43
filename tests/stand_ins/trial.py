"""A stand-in for ``train.py`` in searches: a few lines of metrics.csv, in a tenth of a second.

It takes the same words and keeps the same promises: it continues after its last line, it ends with
143 at SIGTERM, and it never runs twice at the same time for one run. ``$FAKE_SLEEP_S`` is the
length of an epoch, ``$FAKE_GATE`` a file for which the last epoch waits, and ``$FAKE_FAULT`` how
trials with a high learning rate fail; ``killed``: each trial is killed at its first start;
``waits``: bad ones wait before their last epoch until they are ended.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

WORDS = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
EPOCHS = int(WORDS.get("trainer.max_epochs", "3"))
SLEEP_S = float(os.environ.get("FAKE_SLEEP_S", "0"))


def main() -> int:
    run_dir = Path(WORDS["run_root"], os.environ["RUN_ID"])
    run_dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with (run_dir / "claim").open("a") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another process has it
        with (run_dir / "starts.txt").open("a") as file:
            file.write(f"{os.getpid()} {sorted(WORDS.items())}\n")
        is_first = len((run_dir / "starts.txt").read_text().splitlines()) == 1
        if "killed" in os.environ.get("FAKE_FAULT", "") and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        (run_dir / "run.json").write_text("{}")
        return train(run_dir, float(WORDS["model.optimizer.lr"]))


def train(run_dir: Path, lr: float) -> int:
    fault = os.environ.get("FAKE_FAULT", "")
    rows = run_dir / "metrics.csv"
    done = len(rows.read_text().splitlines()) - 1 if rows.exists() else 0
    text = rows.read_text() if done else "epoch,step,val/accuracy\n"
    gate = Path(os.environ.get("FAKE_GATE", "/"))
    waits = "waits" in fault and lr > 0.0025
    for epoch in range(done, EPOCHS):
        time.sleep(SLEEP_S)
        while epoch == EPOCHS - 1 and (waits or not gate.exists()):
            time.sleep(0.02)
        if fault == "always" or (fault == "crash" and lr > 0.01):
            print("error: the loss is infinite", flush=True)
            return 1
        value = "nan" if "nan" in fault and lr > 0.01 else f"{1 - lr + epoch / 1000}"
        text += f"{epoch},{epoch},{value}\n"
        partial = run_dir / "partial"
        partial.write_text(text)
        partial.replace(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
