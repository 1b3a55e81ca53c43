"""What to look for where a run differs, by what differed first."""

from samestep.verify.experiments import AGAIN, DIFFERS, Cell

NOT_REPRODUCIBLE = (
    "two undisturbed runs differ, so the other lines say little. Look for the time of day, for "
    "sets of texts (PYTHONHASHSEED=0 gives them one order), for a random generator without a "
    "seed, and on a GPU for kernels that add in any order (Trainer(deterministic=True))"
)
INTERRUPTED = {
    "samples": (
        "the data began elsewhere than where they were: look for a random generator, a counter or "
        "a list that a data set, sampler or collate_fn keeps outside the checkpoint; give it "
        "state_dict and load_state_dict, or compute it from epoch and index"
    ),
    "loss": (
        "the same samples and another loss: look for what changes in each step and is no "
        "parameter, buffer or attribute of the module, such as a global variable, an object in a "
        "closure or a random generator of your own; keep it by register_buffer or "
        "on_save_checkpoint"
    ),
    "parameter": (
        "the same samples and the same loss, and another step: look for what changes gradients or "
        "the optimizer, such as a hook, a schedule of your own or a closure with a state"
    ),
    "setting": "look for a schedule that changes the optimizer and is not in lr_schedulers",
    "optimizer-state": "look for an optimizer whose state_dict does not hold all of its state",
    "buffer": "look for a buffer with persistent=False, or one that is changed outside of steps",
    "metric": (
        "the weights are the same, so look at the validation: a metric that keeps sums in a list "
        "of its own, or random numbers in the validation data"
    ),
    "row": "the weights are the same, so look at what is logged: a value that is kept outside",
    "length": "an epoch has other batches: look for a sampler or data set that changes its length",
}
ON_RANKS = {
    "samples": (
        "several ranks see other samples in a step than one rank: Trainer(split_batches=True) "
        "splits each batch; look for random numbers that a data set draws for whole batches, and "
        "for a sampler that is not seeded alike on all ranks"
    ),
    "parameter": (
        "the same samples, and another gradient: look for a loss that is no mean over its samples "
        "(class weights, ignore_index, masks, sums, losses that compare samples), for which "
        "samestep.mean and samestep.gather_batch help, and for a layer that sees the batch "
        "(BatchNorm) or draws random numbers (Dropout); with virtual_ranks all of them are equal"
    ),
    "metric": (
        "the weights are the same, so look at the validation: a metric that is no mean over "
        "samples needs torchmetrics, or EpochMean"
    ),
    "ranks": "the ranks have diverged: look for weights that are changed outside of the optimizer",
    "slice": "a batch was cut wrongly: please report this",
    "length": "several ranks have other batches than one: look at the sampler, and at drop_last",
}


def hint_for(name: str, cell: Cell) -> str:
    """What to look for, for a line of the table that differs; empty if there is nothing to say."""
    found = cell.difference
    if cell.word != DIFFERS or found is None:
        return ""
    if name == AGAIN:
        return NOT_REPRODUCIBLE
    # Several ranks that are stopped are compared with several that are not.
    is_on_ranks = name.endswith(" ranks") or found.is_inexcusable
    table = ON_RANKS if is_on_ranks else INTERRUPTED
    return table.get(found.kind, "")
