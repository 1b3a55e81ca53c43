"""Test or validate the model of a run again.

python scripts/evaluate.py run=runs/digits-cnn-3f2a1b
python scripts/evaluate.py run=runs/digits-cnn-3f2a1b split=val format=json
"""

import json
import sys
from pathlib import Path
from typing import Any

from options import run_script

from samestep.errors import ConfigError
from samestep.run.directory import saved


def main(model: Any, data: Any, options: dict[str, Any]) -> int:
    """Print the figures of one split, in one process and over all its images.

    They equal those of the run to the last bit if the run had one process too, on the same machine
    and kind of device, and left no images out.

    Raises:
        ConfigError: if this machine has no such accelerator.
    """
    import lightning as L  # once the words are checked
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    run, split = options["run"], options["split"]
    try:
        trainer = L.Trainer(
            accelerator=options["accelerator"],
            devices=1,
            precision=saved(Path(run)).trainer.precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"accelerator={options['accelerator']}: {error}") from error
    loop = trainer.test if split == "test" else trainer.validate
    figures = loop(model, datamodule=data, verbose=False)[0]
    if options["format"] == "json":
        print(json.dumps(figures, indent=2))
        return 0
    num_images = len(data.test_set if split == "test" else data.val_set)
    width = max(map(len, figures))
    print(f"{run}, {options['ckpt']} checkpoint, {num_images} {split} images")
    print("\n".join(f"  {name:<{width}}  {figure:.4f}" for name, figure in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(run_script("evaluate", __doc__, main))
