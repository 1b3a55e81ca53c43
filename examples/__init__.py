"""Examples beside the template's own: each folder has its code, its configs, a page and its tests.

``language`` (a transformer learns a text), ``tables`` (images in Lance tables, of any number),
``finetune`` (pretrained weights). ``configs/train.yaml`` names their configs and rules.
"""
