"""Checks of libraries: torch, Transformer Engine and its kernels, Megatron Core, and CUDA's libraries.

A host may have two copies of a CUDA library: torch's packages and a CUDA toolkit or the system. Which one is loaded
depends on what is imported first. Mixed parts of two cuDNN versions fail (`undefined symbol`), and two versions of
cuBLAS give different sums.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from megatron_fp8.doctor.finding import Finding, HostContext, Status
from megatron_fp8.doctor.host_checks import gpu_nodes

# Relative error of an FP8 product of random matrices (3 mantissa bits): less than this means it was not FP8 at all.
_FP8_ERRORS = (1e-4, 0.1)


def torch_and_device(context: HostContext) -> Finding:
    """Whether torch imports and sees this machine's GPUs."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        from megatron_fp8 import device

        versions = device.library_versions()
        here = device.prepare()
    nodes = gpu_nodes()
    if here.emulated and (nodes or context.min_gpus):
        said = "; ".join(str(warning.message).splitlines()[0] for warning in warned) or "no reason given"
        text = f"the machine has {len(nodes)} GPUs, but torch uses none of them: {said}"
        if not versions:
            text = f"the machine has {len(nodes)} GPUs, but this torch is a CPU-only build"
        advice = "install a torch built for the driver's CUDA version, or a newer driver; check CUDA_VISIBLE_DEVICES"
        return Finding("torch", Status.FAULT, text, advice, versions)
    return Finding("torch", Status.OK, here.description, versions=versions)


def transformer_engine(context: HostContext) -> Finding:  # noqa: ARG001 - every check is called alike
    """Whether Transformer Engine and its extension import: on GPUs the compiled one."""
    from megatron_fp8 import device

    here = device.prepare()
    import transformer_engine.pytorch as te
    import transformer_engine_torch as extension

    kind = "the CPU stand-in" if here.emulated else extension.__file__
    return Finding("transformer engine", Status.OK, f"{te.__name__} imported; its extension is {kind}")


def fp8(context: HostContext) -> Finding:  # noqa: ARG001
    """Which FP8 recipes this device supports, and whether an FP8 product has the error expected of FP8."""
    from megatron_fp8 import device

    here = device.prepare()
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    from megatron_fp8.precision.policy import Fp8Recipe
    from megatron_fp8.precision.te_recipe import why_unsupported

    reasons = {recipe: why_unsupported(recipe) for recipe in get_args(Fp8Recipe)}
    runs = [recipe for recipe, reason in reasons.items() if reason is None]
    if "tensorwise" not in runs:
        text = f"this device does not support FP8 (use precision.mode=bf16): {reasons['tensorwise']}"
        return Finding("fp8", Status.ABSENT, text)
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(64, 128, generator=generator).to(here.torch_device)
    linear = te.Linear(128, 32, bias=False, params_dtype=torch.float32).to(here.torch_device)
    with torch.no_grad(), te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        product = linear(left)
    exact = left.double() @ linear.weight.detach().double().T
    error = float((product.double() - exact).norm() / exact.norm())
    text = f"recipes {', '.join(runs)}; relative error of an FP8 product against FP64: {error:.1%}"
    if not _FP8_ERRORS[0] < error < _FP8_ERRORS[1]:
        text += f", outside the range expected of FP8 ({_FP8_ERRORS[0]:.2%} to {_FP8_ERRORS[1]:.0%})"
        return Finding(
            "fp8", Status.FAULT, text, "Transformer Engine does not match the GPU: install the image's versions"
        )
    return Finding("fp8", Status.OK, text)


def fused_kernels(context: HostContext) -> Finding:  # noqa: ARG001
    """Whether Transformer Engine's fused norm, attention and optimizer match plain torch."""
    from megatron_fp8 import device

    here = device.prepare()
    import torch
    import transformer_engine.pytorch as te

    # BF16, the only format in which flash and fused attention exist.
    generator = torch.Generator().manual_seed(2)
    hidden, query = (
        torch.randn(shape, generator=generator).to(here.torch_device, torch.bfloat16)
        for shape in ((8, 64), (16, 2, 4, 64))
    )
    errors = {}
    with torch.no_grad():
        norm = te.RMSNorm(64, params_dtype=torch.bfloat16).to(here.torch_device)(hidden)
        errors["RMSNorm"] = _difference(norm, torch.nn.functional.rms_norm(hidden.float(), (64,), eps=1e-5))
        attention = te.DotProductAttention(4, 64, attn_mask_type="causal", qkv_format="sbhd")(query, query, query)
        rows = query.float().permute(1, 2, 0, 3)
        plain = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
        errors["attention"] = _difference(attention, plain.permute(2, 0, 1, 3).reshape(16, 2, 256))
    ours, theirs = (torch.zeros(64, device=here.torch_device, requires_grad=True) for _ in range(2))
    optimizers = te.optimizers.FusedAdam([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    # Adam's first step depends only on the sign of the gradient.
    for gradient in hidden[:3].float():
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    errors["FusedAdam"] = _difference(ours.detach(), theirs.detach())
    wrong = [f"{name}: {error:.2%} off" for name, error in errors.items() if not error < 0.02]
    if wrong:
        text = f"Transformer Engine's kernels give wrong results: {', '.join(wrong)}"
        return Finding(
            "fused kernels", Status.FAULT, text, "install the image's versions of torch and Transformer Engine"
        )
    text = f"Transformer Engine's {', '.join(errors)} match torch"
    return Finding("fused kernels", Status.OK, text)


def apex(context: HostContext) -> Finding:  # noqa: ARG001
    """Whether apex, if installed, works with this torch."""
    if importlib.util.find_spec("apex") is None:
        return Finding("apex", Status.ABSENT, "not installed; not needed, Transformer Engine has the same kernels")
    import apex
    import torch  # noqa: F401 - extensions that link against its libraries need them loaded

    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        return Finding("apex", Status.ABSENT, f"{apex.__file__} lacks the compiled extensions")
    importlib.import_module("fused_weight_gradient_mlp_cuda")
    return Finding("apex", Status.OK, "imported, with its compiled extensions")


def megatron_core(context: HostContext) -> Finding:  # noqa: ARG001
    """Whether Megatron Core imports the way training imports it."""
    from megatron_fp8 import device

    device.prepare()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    names = f"{parallel_state.__name__}, {DistributedDataParallel.__name__}"
    return Finding("megatron core", Status.OK, f"imported ({names})")


def data_helper(context: HostContext) -> Finding:  # noqa: ARG001
    """Whether Megatron's compiled index helper loads, and blends two datasets by their weights."""
    import numpy

    from megatron_fp8.data.order import compiled_helpers

    file_of, sample_of = numpy.zeros(8, dtype=numpy.int16), numpy.zeros(8, dtype=numpy.int64)
    weights = numpy.array([0.75, 0.25])
    compiled_helpers().build_blending_indices(file_of, sample_of, weights, len(weights), len(file_of), False)
    counts = numpy.bincount(file_of, minlength=2).tolist()
    if counts != [6, 2] or int(sample_of.max()) != 5:
        text = f"it took {counts} samples of two datasets with weights 3:1 instead of [6, 2]"
        return Finding("data helper", Status.FAULT, text, "reinstall the megatron-core wheel")
    return Finding("data helper", Status.OK, "Megatron Core's compiled index helper works")


def _difference(ours: object, reference: object) -> float:
    import torch

    assert isinstance(ours, torch.Tensor)
    assert isinstance(reference, torch.Tensor)
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


_ADVICE = (
    "keep one copy: remove the toolkit's or the system's from the image and from LD_LIBRARY_PATH (docker/Dockerfile)"
)
_LIBRARY = re.compile(r"/(lib(?:cu|nccl|nv)[\w-]*(?:\.alt)?)\.so[\d.]*$")
# The driver's own, which the container runtime mounts.
_OF_THE_DRIVER = re.compile(r"/(libcuda|libcudadebugger|libnvidia-[\w-]+)\.so[\d.]*$")


def cuda_libraries(context: HostContext) -> Finding:  # noqa: ARG001 - every check is called alike
    """Whether each CUDA library is loaded once, and all from the packages torch was installed with."""
    from megatron_fp8 import device

    here = device.prepare()
    import torch
    import transformer_engine.pytorch  # noqa: F401 - for what it loads

    if not here.emulated:
        torch.backends.cudnn.version()
    return judged(loaded_files(), Path(torch.__file__).resolve().parents[1])


def loaded_files(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """CUDA library files mapped into a process, sorted."""
    words = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8").splitlines())
    paths = {fields[5] for fields in words if len(fields) == 6}
    return sorted(path for path in paths if _LIBRARY.search(path) and not _OF_THE_DRIVER.search(path))


def judged(paths: Iterable[str], packages: Path) -> Finding:
    """The finding for the files `paths`; `packages`: the site-packages directory that has torch."""
    files: dict[str, list[str]] = {}
    for path in paths:
        match = _LIBRARY.search(path)
        assert match is not None, path
        files.setdefault(match[1], []).append(path)
    twice = [f"{name} from {' and '.join(found)}" for name, found in files.items() if len(found) > 1]
    strange = [path for found in files.values() for path in found if not Path(path).is_relative_to(packages)]
    if not files:
        return Finding("cuda libraries", Status.ABSENT, "this torch is a CPU-only build")
    if twice:
        return Finding("cuda libraries", Status.FAULT, f"loaded twice: {'; '.join(twice[:3])}", _ADVICE)
    if strange:
        text = f"not from the packages torch was installed with: {', '.join(strange[:4])}"
        return Finding("cuda libraries", Status.FAULT, text, _ADVICE)
    return Finding("cuda libraries", Status.OK, f"{len(files)} libraries, each loaded once, all from {packages}")
