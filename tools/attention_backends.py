"""Which attention Transformer Engine would take on an H100 for each config, asked of it and of cuDNN without a GPU.

    python tools/attention_backends.py            the table, as docs/gpu.md has it
    python tools/attention_backends.py --write    put it there

TE's own selection (`get_attention_backend`) runs with compute capability 9.0 and the installed cuDNN's version. What it
asks its library is answered by that library, in a process that `tools/emulated_gpu.c` gives a GPU to be asked about.
Needs the packages of locks/gpu.lock, and gcc.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_fp8.config.load import load_config, process_environment
from megatron_fp8.config.schema import Config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- made by tools/attention_backends.py -->", "<!-- end of the table -->"
# Documents of a micro-batch, which are counted up to a power of two.
_MOST_DOCUMENTS = 1 << 12
_ANSWER = "--answer"
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
Ask = Callable[[dict[str, float]], tuple[int, str]]


@dataclass(frozen=True)
class Attention:
    """One rank's attention: heads and groups are those of its share, `batch` of the micro-batch."""

    config: str
    heads: int
    groups: int
    head_dim: int
    seq_length: int
    batch: int
    dropout: float


def attentions() -> list[Attention]:
    """The attention of every config in configs/, by name."""
    return [_attention(path.stem, load_config(str(path), []).config) for path in sorted(CONFIGS.glob("*.yaml"))]


def _attention(name: str, config: Config) -> Attention:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    groups = model.num_query_groups or model.num_attention_heads
    dim = model.kv_channels or model.hidden_size // model.num_attention_heads
    heads, batch = model.num_attention_heads // tp, config.training.micro_batch_size
    return Attention(name, heads, groups // tp, dim, model.seq_length, batch, model.attention_dropout)


def chosen(
    one: Attention,
    ask: Ask,
    documents: int | None,
    deterministic: bool,
    dtype: str = "bfloat16",
    layouts: Sequence[str] = (),
    **form: Any,
) -> str:
    """`cuDNN` or `unfused`; `documents`: how many are kept apart in the micro-batch, None: samples are whole.

    `layouts`: of queries, keys and values, by default those of training; `form`: more fields of TE's `AttentionParams`.
    """
    import torch
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    packed = documents is not None
    tokens = one.batch * one.seq_length if packed else 0
    # Without rotary positions query, key and value stay in the one tensor that their GEMM wrote.
    usual = ["thd_thd_thd"] if packed else ["sbhd_sbhd_sbhd", *(["sbh3d"] if one.heads == one.groups else [])]
    found = set()
    for layout in layouts or usual:
        asked = {
            "qkv_dtype": getattr(torch, dtype),
            "qkv_layout": layout,
            "batch_size": documents or one.batch,
            "num_heads": one.heads,
            "num_gqa_groups": one.groups,
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), one.seq_length),
            **dict.fromkeys(("num_tokens_q", "num_tokens_kv"), tokens),
            **dict.fromkeys(("head_dim_qk", "head_dim_v"), one.head_dim),
            "attn_mask_type": "padding_causal" if packed else "causal",
            "core_attention_bias_requires_grad": False,
            "attention_dropout": one.dropout,
            "deterministic": deterministic,
            "softmax_scale": one.head_dim**-0.5,
            **form,
        }
        with _on_an_h100(utils, ask):
            flash, _, fused, _, unfused, _ = utils.get_attention_backend(utils.AttentionParams(**asked))
        found.add("flash-attn" if flash else "cuDNN" if fused else "unfused" if unfused else "none")
    return " or ".join(sorted(found))


@contextmanager
def _on_an_h100(utils: Any, ask: Ask) -> Iterator[None]:
    def backend(params: Any) -> tuple[int, str]:
        values = {field.name: getattr(params, field.name) for field in fields(params)}
        asked = {name: value if isinstance(value, float) else int(value) for name, value in values.items()}
        number, reason = ask(asked)
        return utils.FusedAttnBackend(number) if number >= 0 else utils.FusedAttnBackend.No_Backend, reason

    from megatron_fp8.doctor.package_checks import installed

    version = tuple(map(int, (installed("nvidia-cudnn-cu13") or "").split(".")[:3]))
    clean = {name: value for name, value in process_environment().items() if not name.startswith("NVTE_")}
    with (
        mock.patch.object(utils, "get_device_compute_capability", return_value=(9, 0)),
        mock.patch.object(utils, "get_cudnn_version", return_value=version),
        mock.patch.object(utils.tex, "get_fused_attn_backend", backend),
        mock.patch.dict("os.environ", clean, clear=True),
    ):
        yield


def packed(one: Attention, ask: Ask, deterministic: bool) -> str:
    """What documents kept apart are given, by how many a micro-batch has."""
    counts = [1 << power for power in range(_MOST_DOCUMENTS.bit_length())]
    choices = [chosen(one, ask, count, deterministic) for count in counts]
    if len(set(choices)) == 1:
        return choices[0]
    changes = next(place for place, choice in enumerate(choices) if choice != choices[0])
    most = counts[changes - 1]
    return f"{choices[0]} up to {most} document{'s' if most > 1 else ''}, then {choices[changes]}"


def rows(ask: Ask) -> list[list[str]]:
    """The table's cells, its head first."""
    head = ["config", "heads / groups x dim", "samples x tokens", "dropout", "as it is", "documents apart"]
    table = [[*head, "deterministic", "deterministic, documents apart", "FP32"]]
    for one in attentions():
        shape = [f"{one.heads} / {one.groups} x {one.head_dim}", f"{one.batch} x {one.seq_length}", f"{one.dropout:g}"]
        whole = [chosen(one, ask, None, deterministic) for deterministic in (False, True)]
        apart = [packed(one, ask, deterministic) for deterministic in (False, True)]
        single = chosen(one, ask, None, False, "float32")
        table.append([f"`{one.config}`", *shape, whole[0], apart[0], whole[1], apart[1], single])
    return table


def markdown(table: list[list[str]]) -> str:
    """The table as docs/gpu.md has it."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]) + "\n"


def in_docs(page: str) -> str:
    """The table that a page has between its marks."""
    return page.partition(f"{BEGIN}\n")[2].partition(END)[0]


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
            [sys.executable, __file__, _ANSWER],
            env={**process_environment(), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


def answer() -> int:
    """For each line of standard input, fields of TE's `FusedAttnConfig` as JSON, write `[backend, reason]`."""
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
    return 0


def main() -> int:
    """Print or write the table; exit code 2 where something is not installed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    settings = parser.parse_args()
    if (lacking := missing()) is not None:
        parser.error(f"{lacking} is missing: install locks/gpu.lock")
    from megatron_fp8 import cpu

    cpu.install()
    answers = Answers()
    table = markdown(rows(answers.ask))
    answers.close()
    if settings.write:
        page = PAGE.read_text(encoding="utf-8")
        before, begin, rest = page.partition(f"{BEGIN}\n")
        _, end, after = rest.partition(END)
        PAGE.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")
    else:
        print(table, end="")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == [_ANSWER]:
        answer()
    else:
        sys.exit(main())
