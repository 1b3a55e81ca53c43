"""Start from pretrained weights, and freeze them for some epochs: README.md.

Read in this order: ``net`` (a backbone with a new last layer), ``finetuning`` (loads the weights,
freezes the backbone, and releases it).
"""
