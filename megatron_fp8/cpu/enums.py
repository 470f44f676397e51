"""Enumerations and constants of Transformer Engine's compiled extension, with its names and values.

The values are those of TE's C headers (`transformer_engine.h`, `fused_attn.h`, `fused_router.h`,
`comm_gemm_overlap.h`); TE's Python checks some of them at import and stores them as integers in checkpoints. Library
versions and capabilities describe a Hopper machine with current libraries and no Userbuffers links.
"""

from __future__ import annotations

from enum import IntEnum

EXTENSION_NAME = "transformer_engine_torch"


class _ExtensionEnum(IntEnum):
    """Pickles name the extension's module, so that they load where TE's real one is installed."""

    def __init_subclass__(cls) -> None:
        cls.__module__ = EXTENSION_NAME


class DType(_ExtensionEnum):
    """TE data types. Gaps are types that the C library does not expose to Python."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FP8FwdTensors(_ExtensionEnum):
    """Index of a forward tensor in a module's FP8 scales and amax history."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(_ExtensionEnum):
    """Index of a backward tensor in a module's FP8 scales and amax history."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class NVTEScalingMode(_ExtensionEnum):
    """How a quantized tensor is scaled."""

    NVTE_DELAYED_TENSOR_SCALING = 0
    NVTE_MXFP8_1D_SCALING = 1
    NVTE_BLOCK_SCALING_1D = 2
    NVTE_BLOCK_SCALING_2D = 3
    NVTE_NVFP4_1D_SCALING = 4
    NVTE_INVALID_SCALING = 100


class Float8BlockScaleTensorFormat(_ExtensionEnum):
    """Order of the scales of blocks of 128."""

    GEMM_READY = 0
    COMPACT = 1
    INVALID = 2


class NVTE_Bias_Type(_ExtensionEnum):
    """Attention bias."""

    NVTE_NO_BIAS = 0
    NVTE_PRE_SCALE_BIAS = 1
    NVTE_POST_SCALE_BIAS = 2
    NVTE_ALIBI = 3


class NVTE_Mask_Type(_ExtensionEnum):
    """Attention mask."""

    NVTE_NO_MASK = 0
    NVTE_PADDING_MASK = 1
    NVTE_CAUSAL_MASK = 2
    NVTE_PADDING_CAUSAL_MASK = 3
    NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4
    NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5


class NVTE_Softmax_Type(_ExtensionEnum):
    """Attention softmax."""

    NVTE_VANILLA_SOFTMAX = 0
    NVTE_OFF_BY_ONE_SOFTMAX = 1
    NVTE_LEARNABLE_SOFTMAX = 2


class NVTE_Fused_Attn_Backend(_ExtensionEnum):
    """Fused attention sub-backend. 0 was removed from TE and is not reused."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class NVTE_QKV_Format(_ExtensionEnum):
    """Order of sequence, batch and head of Q and of K, V where they differ."""

    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2
    NVTE_BSHD_2SBHD = 3
    NVTE_SBHD_2BSHD = 4
    NVTE_THD_2BSHD = 5
    NVTE_THD_2SBHD = 6
    NVTE_BHSD = 7
    NVTE_QKV_Format_NOT_SET = 8


class NVTE_QKV_Layout(_ExtensionEnum):
    """Memory layout of Q, K and V."""

    NVTE_SB3HD = 0
    NVTE_SBH3D = 1
    NVTE_SBHD_SB2HD = 2
    NVTE_SBHD_SBH2D = 3
    NVTE_SBHD_SBHD_SBHD = 4
    NVTE_BS3HD = 5
    NVTE_BSH3D = 6
    NVTE_BSHD_BS2HD = 7
    NVTE_BSHD_BSH2D = 8
    NVTE_BSHD_BSHD_BSHD = 9
    NVTE_T3HD = 10
    NVTE_TH3D = 11
    NVTE_THD_T2HD = 12
    NVTE_THD_TH2D = 13
    NVTE_THD_THD_THD = 14
    NVTE_SBHD_BSHD_BSHD = 15
    NVTE_BSHD_SBHD_SBHD = 16
    NVTE_THD_BSHD_BSHD = 17
    NVTE_THD_SBHD_SBHD = 18
    NVTE_Paged_KV_BSHD_BSHD_BSHD = 19
    NVTE_Paged_KV_BSHD_SBHD_SBHD = 20
    NVTE_Paged_KV_SBHD_BSHD_BSHD = 21
    NVTE_Paged_KV_SBHD_SBHD_SBHD = 22
    NVTE_Paged_KV_THD_BSHD_BSHD = 23
    NVTE_Paged_KV_THD_SBHD_SBHD = 24
    NVTE_BHSD_BHSD_BHSD = 25
    NVTE_QKV_Layout_NOT_SET = 26


class NVTERoutingMapFormat(_ExtensionEnum):
    """Layout of a mixture-of-experts routing map."""

    BYTEMAP = 0
    BITMAP_U8 = 1


class NVTEQBHistogramMode(_ExtensionEnum):
    """How the router's quantile-balancing histogram is computed."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


class CommOverlapType(_ExtensionEnum):
    """Collective that a GEMM is overlapped with: reduce-scatter or all-gather."""

    RS = 0
    AG = 1


class CommGemmOverlapRole(_ExtensionEnum):
    """Side of the GEMM that the overlapped collective works on."""

    INPUT = 0
    OUTPUT = 1


class CommOverlapAlgo(_ExtensionEnum):
    """Userbuffers overlap algorithm."""

    BULK_OVERLAP_AG = 0
    BULK_OVERLAP_RS = 1
    SPLIT_PIPELINED_AG_P2P = 2
    SPLIT_PIPELINED_RS = 3
    SPLIT_PIPELINED_RS_P2P = 4
    ATOMIC_GEMM_RS = 5
    ATOMIC_GEMM_AG_P2P = 6
    ATOMIC_GEMM_RS_P2P = 7
    EXTERNAL_BULK_OVERLAP_AG = 8


def get_cublasLt_version() -> int:
    """cuBLASLt version as CUDA encodes it. TE requires >= 120103 for FP8 on Hopper."""
    return 130000


def get_cudnn_version() -> int:
    """cuDNN version, `major * 10000 + minor * 100 + patch`."""
    return 91800


def get_num_cublas_streams() -> int:
    """Number of compute streams that grouped GEMMs are spread over."""
    return 1


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Lowest and highest stream priority."""
    del device_id
    return 0, 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether GPUs share multicast memory, which Userbuffers overlap needs."""
    del device_id
    return False


def ubuf_built_with_mpi() -> bool:
    """Whether Userbuffers bootstrap over MPI."""
    return False
