"""Your project: models, data, training."""
