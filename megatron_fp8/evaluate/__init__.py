"""Evaluates the model of a checkpoint: its loss on token files, and tasks of lm-eval."""
