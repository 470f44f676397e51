"""Asks Transformer Engine's library, and it cuDNN, which fused attention a GPU would run: without that GPU.

`python tools/fused_attention.py`, with `tools/emulated_gpu.c` loaded before it: for each line of standard input, the
fields of TE's `FusedAttnConfig` by name as JSON, it writes `[backend, reason]`. `Answers` starts it.
TE's library and cuDNN are those of docker/gpu.lock; a compiler is needed, headers are in the packages too.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = Path(sysconfig.get_path("purelib"))
NVIDIA = PACKAGES / "nvidia"
LIBRARY = PACKAGES / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so"
SHIM = Path(__file__).with_name("emulated_gpu.c")
# As NVIDIA publishes them for the H100 with 80 GB of HBM3, under the names that cuDNN 9.20 asks for.
H100 = {
    **{
        "deviceName": "NVIDIA H100 80GB HBM3",
        "deviceVer": 900,
        "driverVer": 13000,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
    },
    **{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "warpSize": 32},
    **{"multiProcessorCount": 132, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048},
    **{"regsPerBlock": 65536, "maxRegistersPerSM": 65536, "l2CacheSize": 52428800, "totalGlobalMem": 85017755648},
    **{"maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024},
    **{"smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "isTccDriver": 0, "supportCoopLaunch": 1},
}
# TE's enum NVTEFusedAttnConfigAttribute, in its order (transformer_engine/fused_attn.h).
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("is_training", "deterministic", "cuda_graph", "return_max_logit"), ctypes.c_uint8),
    **dict.fromkeys(("attn_mask_type", "bias_type"), ctypes.c_int),
    **dict.fromkeys(("window_size_left", "window_size_right"), ctypes.c_int64),
    "bottom_right_diagonal": ctypes.c_uint8,
    **dict.fromkeys(("softmax_type", "scaling_mode"), ctypes.c_int),
    **dict.fromkeys(("dropout", "attn_scale"), ctypes.c_float),
    **dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), ctypes.c_int),
    **dict.fromkeys(("qkv_layout", "o_format", "do_format", "dqkv_layout"), ctypes.c_int),
    **dict.fromkeys(("qkv_scale_inv_format", "do_scale_inv_format"), ctypes.c_int),
    **dict.fromkeys(("batch_size", "num_attn_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v"), ctypes.c_size_t),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "num_tokens_q", "num_tokens_kv"), ctypes.c_size_t),
    **dict.fromkeys(("num_pages_k", "num_pages_v", "page_size_k", "page_size_v"), ctypes.c_size_t),
    **dict.fromkeys(("max_pages_per_seq_k", "max_pages_per_seq_v"), ctypes.c_size_t),
    **dict.fromkeys(("bias_batch_size", "bias_num_heads", "bias_seqlen_q", "bias_seqlen_kv"), ctypes.c_size_t),
}


def missing() -> str | None:
    """What this needs and is not installed; None: nothing."""
    needed = [LIBRARY, NVIDIA / "cudnn/include/cudnn.h", NVIDIA / "cu13/include/crt/host_config.h"]
    return next((str(path) for path in needed if not path.is_file()), None)


class Answers:
    """A process that has an emulated H100; `ask` gives the number of TE's sub-backend (-1: none) and the reason."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        shim, driver = Path(self._directory.name) / "shim.so", Path(self._directory.name) / "libcuda.so.1"
        build = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
        headers = [word for part in ("cu13", "cudnn") for word in ("-isystem", f"{NVIDIA / part / 'include'}")]
        subprocess.run([*build, *headers, str(SHIM), "-o", str(shim), "-ldl"], check=True)
        subprocess.run([*build, "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(driver)], check=True)
        environment = {"LD_PRELOAD": str(shim), "LD_LIBRARY_PATH": self._directory.name}
        environment |= {"EMULATED_GPU": json.dumps(H100), "EMULATED_CAPABILITY": str(H100["deviceVer"])[:2]}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            **{"env": {**os.environ, **environment}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
        )

    def ask(self, fields: dict[str, float]) -> tuple[int, str]:
        """Raises RuntimeError where the process died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that asks Transformer Engine ended with {self._process.wait()}")
        backend, reason = json.loads(line)
        return backend, reason

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._directory.cleanup()


def main() -> None:
    """Answer the lines of standard input."""
    places = ("cu13/lib/libcudart.so.13", "cu13/lib/libcublasLt.so.13", "cu13/lib/libcublas.so.13")
    needed = [NVIDIA / place for place in (*places, "nccl/lib/libnccl.so.2", "cu13/lib/libnvrtc.so.13")]
    for path in [*needed, *sorted(NVIDIA.glob("cudnn/lib/libcudnn*.so.9")), LIBRARY]:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    library.nvte_create_fused_attn_config.restype = ctypes.c_void_p
    for line in sys.stdin:
        asked = json.loads(line)
        config = ctypes.c_void_p(library.nvte_create_fused_attn_config())
        for number, (name, kind) in enumerate(_FIELDS.items()):
            if name in asked:
                value = kind(asked.pop(name))
                size = ctypes.c_size_t(ctypes.sizeof(kind))
                library.nvte_set_fused_attn_config_attribute(config, number, ctypes.byref(value), size)
        if asked:
            raise KeyError(f"Transformer Engine's config has no {', '.join(asked)}")
        reason = ctypes.c_char_p()
        backend = library.nvte_get_fused_attn_backend_v2(config, ctypes.byref(reason))
        library.nvte_destroy_fused_attn_config(config)
        print(json.dumps([backend, (reason.value or b"").decode()]), flush=True)


if __name__ == "__main__":
    main()
