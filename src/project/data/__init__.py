"""Images and labels, from disk to batches on the device: datamodule, sources, augment, rules."""
