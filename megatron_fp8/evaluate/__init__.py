"""Measures models in checkpoints: losses of token files, and tasks of lm-eval."""
