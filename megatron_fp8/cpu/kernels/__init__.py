"""What Transformer Engine's CUDA kernels compute, in PyTorch operations, by theme."""
