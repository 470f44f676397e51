"""Checkpoints to Hugging Face's form and back: what corresponds to what, and the files on both sides."""
