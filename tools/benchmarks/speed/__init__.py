"""The benchmark: our training step beside a plain-PyTorch loop of the same model, and the machine's GEMM rate."""
