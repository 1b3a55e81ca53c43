"""The shapes, in the order of the table."""

from . import classes, contrastive, generative, layers, regression, segmentation, sequences

SHAPES = (
    *classes.SHAPES,
    *segmentation.SHAPES,
    *contrastive.SHAPES,
    *sequences.SHAPES,
    *regression.SHAPES,
    *generative.SHAPES,
    *layers.SHAPES,
)
