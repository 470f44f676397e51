"""Texts to be encoded: which files they are in, and reading these in blocks from any position."""
