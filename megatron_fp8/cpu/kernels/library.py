"""Owns what `transformer_engine_torch` answers about its libraries and device: as those of an H100 node.

Must not know kernels.
"""

__all__ = [
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "ubuf_built_with_mpi",
]


def get_cublasLt_version() -> int:
    """Version of cuBLASLt, one that has every FP8 GEMM (13.0)."""
    return 130000


def get_cudnn_version() -> int:
    """Version of cuDNN, one that has every fused attention (9.13)."""
    return 91300


def get_num_cublas_streams() -> int:
    """Streams of a grouped GEMM."""
    return 4


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:  # noqa: ARG001
    """Lowest and highest priority of a stream."""
    return (0, 0)


def device_supports_multicast(device_id: int = -1) -> bool:  # noqa: ARG001
    """Whether NVLink multicast is there."""
    return False


def ubuf_built_with_mpi() -> bool:
    """Whether Userbuffers start through MPI."""
    return False
