"""Benchmarks: training speed against plain PyTorch (`speed`), and number formats against each other (`formats`)."""
