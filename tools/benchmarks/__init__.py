"""Benchmarks: training speed beside plain PyTorch (`speed`), and number formats beside each other (`formats`)."""
