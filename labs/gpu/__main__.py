"""Runs ``samestep verify --gpu`` on many settings of the template; each prints one line as it ends.

python -m labs.gpu                       # every setting, on the GPUs of this machine
python -m labs.gpu deterministic fsdp    # those whose name contains one of these texts
python -m labs.gpu --jobs 8              # so many settings at once; 4 without it
python -m labs.gpu --accelerator cpu mlp # try it without a GPU

Without ``deterministic`` kernels of cuDNN add in any order. Two undisturbed runs differ then, and
the others differ as much.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from labs.command import is_chosen, make_parser
from library.tests.programs import PATIENCE_S
from samestep.plugins import device_option
from samestep.ranks import process
from samestep.verify.experiments import AGAIN, DIFFERS, FAILED, GOOD, Cell, Experiments, Settings
from tests.conftest import ROOT, environment

EXACT = "trainer.deterministic=true"
SETTINGS: dict[str, tuple[str, ...]] = {
    "cnn": (),
    "cnn, deterministic": (EXACT,),
    "cnn, bf16-mixed": ("trainer.precision=bf16-mixed",),
    "cnn, bf16-true": ("trainer.precision=bf16-true",),
    "cnn, 16-mixed, deterministic": ("trainer.precision=16-mixed", EXACT),
    "cnn, 64-true": ("trainer.precision=64-true",),
    "mlp": ("model=mlp",),
    "mlp, accumulates": ("model=mlp", "trainer.accumulate_grad_batches=3"),
    "mlp, clipped, 16-mixed": (
        "model=mlp", "trainer.precision=16-mixed", "trainer.gradient_clip_val=0.5",
    ),
    "cnn, averaged weights": ("callbacks=ema",),
    "cnn, compiled, deterministic": ("model.compile=true", EXACT),
    "cnn, ddp": ("trainer.strategy=ddp",),
    "cnn, ddp, sync_batchnorm": ("trainer.strategy=ddp", "trainer.sync_batchnorm=true"),
    "mlp, clipped, bf16-mixed": (
        "model=mlp", "trainer.precision=bf16-mixed", "trainer.gradient_clip_val=0.5",
    ),
    "cnn, compiled, bf16-mixed": ("trainer.precision=bf16-mixed", "model.compile=true"),
    "mlp, fsdp": ("trainer=fsdp", "model=mlp", "trainer.precision=32-true"),
    "mlp, fsdp, bf16-mixed": ("trainer=fsdp", "model=mlp", "trainer.precision=bf16-mixed"),
    "mlp, fsdp, bf16-true": ("trainer=fsdp", "model=mlp", "trainer.precision=bf16-true"),
    "language": ("experiment=language", "data.file=README.md", "data.global_batch_size=16"),
}  # fmt: skip
"""Overrides of train.py by the name of a setting."""


def main() -> int:
    parser = make_parser("gpu", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of settings")
    parser.add_argument("--jobs", type=int, default=4, help="settings at once")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    args = parser.parse_args()
    num_gpus = device_option.num_gpus("gpu")
    if args.accelerator == "gpu" and not num_gpus:
        print("error: this machine has no GPU that torch can use", file=sys.stderr)
        return 2
    ranks = 2 if args.accelerator == "cpu" else min(2, num_gpus)
    chosen = [name for name in SETTINGS if is_chosen(name, args.names)]
    is_good = True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        waiting = {}
        for name in chosen:
            waiting[pool.submit(verify, name, Path(folder, name), args.accelerator, ranks)] = name
        for done in as_completed(waiting):
            cells = done.result()
            is_good &= print_row(waiting[done], cells)
    return 0 if is_good else 1


def verify(name: str, folder: Path, accelerator: str, ranks: int) -> dict[str, Cell]:
    """The cells of one setting."""
    settings = Settings(
        command=[sys.executable, "train.py", *SETTINGS[name]],
        directory=folder,
        make_workplace=lambda _: ROOT,
        ranks=ranks,
        accelerator=accelerator,
        timeout_s=PATIENCE_S,
        variables=environment(),
    )
    return Experiments(settings).run()


def print_row(name: str, cells: dict[str, Cell]) -> bool:
    """Print the cells of a setting; returns whether nothing differs that should be the same."""
    words = ", ".join(cell.word for cell in cells.values())
    print(f"{name}  [{words}]", flush=True)
    for column, cell in cells.items():
        if cell.word not in GOOD:
            print(f"    {column}: {cell.word}: {cell.why}", flush=True)
    has_failed = any(cell.word == FAILED for cell in cells.values())
    is_reproducible = cells.get(AGAIN, Cell("")).word != DIFFERS
    differs = any(cell.word == DIFFERS for cell in cells.values())
    # What is not reproducible at all says nothing about interruptions.
    return not has_failed and not (is_reproducible and differs)


if __name__ == "__main__":
    process.run(main)
