"""Images from disk to batches on the device: datamodule, sources, download, augment, rules."""
