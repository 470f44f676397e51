"""Checkpoints: written in the background, intact whenever a job is killed, loaded under any layout."""
