"""Inference: a checkpoint's model ready for forward passes, sampling, and the generation loop."""
