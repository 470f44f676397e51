"""What training reads: token files, the order of their samples, batches, tokenizers (`prepare/` makes the files)."""
