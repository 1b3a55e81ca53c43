"""Nets: images ``[B, C, H, W]`` in, logits ``[B, num_classes]`` out."""
