"""Examples beside the template's own: each folder has its code, its configs and its tests.

``skeleton`` (the smallest model and data), ``language`` (a transformer learns a text), ``tables``
(images in Lance tables, of any number), ``finetune`` (pretrained weights). ``configs/train.yaml``
names their configs.
"""
