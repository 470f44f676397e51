"""What the extension answers about the libraries and the device that it was built for.

Owns the answers that decide nothing about numbers: library versions, stream counts, link capabilities. They
describe a Hopper machine with current libraries, without Userbuffers links between GPUs.
"""

from __future__ import annotations

__all__ = [
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "ubuf_built_with_mpi",
]


def get_cublasLt_version() -> int:
    """cuBLASLt version as CUDA encodes it. TE asks for >= 120103 before it allows FP8 on Hopper."""
    return 130000


def get_cudnn_version() -> int:
    """cuDNN version, `major * 10000 + minor * 100 + patch`."""
    return 91800


def get_num_cublas_streams() -> int:
    """Number of compute streams that grouped GEMMs are spread over. On CPUs everything is in one order."""
    return 1


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Lowest and highest stream priority. Streams have none here."""
    del device_id
    return 0, 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether GPUs share multicast memory, as Userbuffers overlap needs. Never here."""
    del device_id
    return False


def ubuf_built_with_mpi() -> bool:
    """Whether Userbuffers bootstrap over MPI. Never here."""
    return False
