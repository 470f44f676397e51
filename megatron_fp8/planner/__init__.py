"""What a run will take, before anything runs: parameters, memory, FLOPs, messages, waiting, days. Imports no torch."""
