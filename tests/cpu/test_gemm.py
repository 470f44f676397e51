"""The stand-in's GEMM against float64, on the numbers that its operands hold; TE's Linear on top of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fp8.cpu import install

install()

import transformer_engine.pytorch as te_pytorch  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from transformer_engine.pytorch import tensor as te  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import general_gemm  # noqa: E402

from tests.cpu.fp8_reference import on_gpu  # noqa: E402

M, N, K = 48, 16, 32
# Shapes of A and B and whether they are transposed, by layout.
LAYOUTS = {"TN": ((N, K), (M, K)), "NN": ((K, N), (M, K)), "NT": ((K, N), (K, M))}
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Pairs of operands that a GPU multiplies, and the dtypes of their products.
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PAIRS = {
    ("fp32", "fp32"): [FP32],
    ("bf16", "bf16"): [FP32, BF16],
    ("fp16", "fp16"): [FP32, FP16],
    ("e4m3 delayed", "e4m3 delayed"): [FP32, BF16, FP16],
    ("e4m3 delayed", "e5m2 delayed"): [FP32, BF16, FP16],
    ("e5m2 delayed", "e4m3 current"): [FP32, BF16, FP16],
}


def operand(kind: str, shape: tuple[int, ...], seed: int, **usages: bool) -> Any:
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed))
    if " " not in kind:
        return x.to({"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp64": torch.float64, "int8": torch.int8}[kind])
    dtype = tex.DType.kFloat8E4M3 if kind.startswith("e4m3") else tex.DType.kFloat8E5M2
    if kind.endswith("current"):
        return tex.quantize(x.bfloat16(), te.Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **usages))
    scale = torch.tensor([70.7 + seed])
    return tex.quantize(x.bfloat16(), te.Float8Quantizer(scale, torch.zeros(1), dtype, **usages))


def numbers(value: Any) -> torch.Tensor:
    """The float64 numbers that an operand stands for, computed apart from the stand-in's casts."""
    if not isinstance(value, te.Float8TensorStorage):
        return value.double()
    data = value._data if value._data is not None else value._transpose.movedim(0, -1)
    fp8 = torch.float8_e4m3fn if value._fp8_dtype == tex.DType.kFloat8E4M3 else torch.float8_e5m2
    return data.contiguous().view(fp8).double() * value._scale_inv.double()


def product(a: Any, b: Any, layout: str) -> torch.Tensor:
    left, right = numbers(b), numbers(a)
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    return (left.t() if layout[1] == "T" else left) @ (right.t() if layout[0] == "T" else right)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding to `dtype` of an FP32 sum: elementwise within it, and the sum's own error of the largest term."""
    assert actual.dtype == dtype
    error = (actual.double() - expected).abs()
    allowed = RELATIVE[dtype] * expected.abs() + 2e-6 * expected.abs().max()
    assert bool((error <= allowed).all()), error.max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_layouts_and_operand_kinds(kinds: tuple[str, str], layout: str) -> None:
    a, b = (operand(kind, shape, i) for i, (kind, shape) in enumerate(zip(kinds, LAYOUTS[layout], strict=True)))
    for dtype in PAIRS[kinds]:
        result = general_gemm(a, b, out_dtype=dtype, layout=layout)[0]
        assert_near(result, product(a, b, layout), dtype)


def test_leading_axes_of_the_input_stay() -> None:
    a, b = operand("e4m3 delayed", (N, K), 0), operand("e4m3 delayed", (4, 12, K), 1)
    result = general_gemm(a, b, out_dtype=torch.float32)[0]
    assert result.shape == (4, 12, N)
    assert_near(result.reshape(-1, N), product(a, b, "TN"), torch.float32)


# The usages that FP8 GEMMs of A and B read by layout: rowwise where the summed axis is the last.
USAGES = {"TN": ("rowwise", "rowwise"), "NN": ("columnwise", "rowwise"), "NT": ("columnwise", "columnwise")}


def operand_with(usage: str, shape: tuple[int, ...], seed: int) -> Any:
    return operand("e4m3 delayed", shape, seed, rowwise=usage == "rowwise", columnwise=usage == "columnwise")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usage_that_a_gpu_reads_is_enough(layout: str) -> None:
    """Columnwise bytes also as a collective or a copy leaves them, not as a view of rowwise bytes."""
    a, b = (operand_with(*rest, i) for i, rest in enumerate(zip(USAGES[layout], LAYOUTS[layout], strict=True)))
    expected = product(a, b, layout)
    assert_near(general_gemm(a, b, out_dtype=torch.float32, layout=layout)[0], expected, torch.float32)
    for x in (a, b):
        x._transpose = None if x._transpose is None else x._transpose.contiguous()
    assert_near(general_gemm(a, b, out_dtype=torch.float32, layout=layout)[0], expected, torch.float32)


@pytest.mark.parametrize("wrong", [0, 1], ids=["A", "B"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_other_usage_is_refused_before_blackwell(layout: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's FP8 GEMMs are "TN" alone; later GPUs read any layout of FP8 with one scale a tensor."""
    usages = list(USAGES[layout])
    usages[wrong] = "columnwise" if usages[wrong] == "rowwise" else "rowwise"
    a, b = (operand_with(*rest, i) for i, rest in enumerate(zip(usages, LAYOUTS[layout], strict=True)))
    missing = "row-wise" if usages[wrong] == "columnwise" else "column-wise"
    with pytest.raises(RuntimeError, match=f"Input {'AB'[wrong]} is missing {missing} usage"):
        general_gemm(a, b, out_dtype=torch.float32, layout=layout)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert_near(general_gemm(a, b, out_dtype=torch.float32, layout=layout)[0], product(a, b, layout), torch.float32)


def test_a_transpose_that_is_out_of_date_is_not_read() -> None:
    a, b = operand("e4m3 delayed", (K, N), 0), operand("e4m3 delayed", (M, K), 1)
    a._transpose_invalid = True
    with pytest.raises(RuntimeError, match="Input A is missing column-wise usage"):
        general_gemm(a, b, out_dtype=torch.float32, layout="NN")


NOTHING_SUITS = "Unable to find any suitable algorithms"
# By name: kinds of A and B, shape of A `[columns, k]`, of B `[rows, k]`, options, and the error's words.
REFUSED: dict[str, tuple[str, str, tuple[int, int], tuple[int, int], dict[str, Any], str]] = {
    "E5M2 x E5M2": ("e5m2 delayed", "e5m2 current", (N, K), (M, K), {}, "no FP8 GEMM of E5M2 x E5M2"),
    "FP8 x BF16": ("e4m3 delayed", "bf16", (N, K), (M, K), {}, "compatible scaling modes"),
    "BF16 x FP8": ("bf16", "e4m3 delayed", (N, K), (M, K), {}, "compatible scaling modes"),
    "BF16 x FP16": ("bf16", "fp16", (N, K), (M, K), {}, NOTHING_SUITS),
    "FP32 x BF16": ("fp32", "bf16", (N, K), (M, K), {}, NOTHING_SUITS),
    "FP32 to BF16": ("fp32", "fp32", (N, K), (M, K), {"out_dtype": BF16}, NOTHING_SUITS),
    "BF16 to FP16": ("bf16", "bf16", (N, K), (M, K), {"out_dtype": FP16}, NOTHING_SUITS),
    "k of A": ("e4m3 delayed", "e4m3 delayed", (N, 24), (M, 24), {}, "Leading dimension requirement on A .* 24"),
    "k, current scaling": ("e4m3 current", "e4m3 current", (N, 120), (M, 120), {}, "Leading dimension .* 120"),
    "columns to BF16": ("e4m3 delayed", "e4m3 delayed", (12, K), (M, K), {"out_dtype": BF16}, "12 columns"),
    "columns to FP32": ("e4m3 delayed", "e4m3 delayed", (18, K), (M, K), {}, "18 columns"),
    "BF16 bias to FP32": ("bf16", "bf16", (N, K), (M, K), {"bias": torch.zeros(N, dtype=BF16)}, "bias is .*bfloat16"),
    "FP32 bias, FP8": ("e4m3 delayed", "e4m3 delayed", (N, K), (M, K), {"bias": torch.zeros(N)}, "bias of .*float32"),
    "FP16 bias to BF16, FP8": (
        *("e4m3 delayed", "e4m3 delayed", (N, K), (M, K)),
        *({"bias": torch.zeros(N, dtype=FP16), "out_dtype": BF16}, "bias of .*float16"),
    ),
    "bias gradient, FP8": (
        *("e4m3 delayed", "e4m3 delayed", (N, K), (M, K), {"bias": torch.zeros(N), "grad": True}),
        "no bias gradient",
    ),
    "beta alone": ("bf16", "bf16", (N, K), (M, K), {"beta": 2.0}, "scale must be zero"),
    "INT8": ("int8", "int8", (N, K), (M, K), {}, "int8"),
    "FP64": ("fp64", "fp64", (N, K), (M, K), {}, "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gpu_refuses(case: str) -> None:
    kind_a, kind_b, shape_a, shape_b, options, words = REFUSED[case]
    a, b = operand(kind_a, shape_a, 0), operand(kind_b, shape_b, 1)
    with pytest.raises((RuntimeError, ValueError), match=words):
        general_gemm(a, b, **{"out_dtype": FP32, **on_gpu(options)})


def test_a_result_of_fp8_takes_no_accumulation_and_no_e5m2_of_e4m3() -> None:
    a, b = operand("e4m3 delayed", (N, K), 0), operand("e4m3 delayed", (M, K), 1)
    e4m3, e5m2 = (
        te.Float8Quantizer(torch.ones(1), torch.zeros(1), dtype)
        for dtype in (tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2)
    )
    with pytest.raises(RuntimeError, match="has no E5M2 result"):
        general_gemm(a, b, out_dtype=BF16, quantization_params=e5m2)
    with pytest.raises(RuntimeError, match="not supported with FP8 GEMM output"):
        general_gemm(
            a, b, out_dtype=BF16, quantization_params=e4m3, out=e4m3(torch.zeros(M, N, dtype=BF16)), accumulate=True
        )
    wide = operand("e4m3 delayed", (24, K), 0)
    with pytest.raises(RuntimeError, match=r"24 columns of torch\.float8_e4m3fn"):
        general_gemm(wide, b, out_dtype=BF16, quantization_params=e4m3)
    assert general_gemm(wide, b, out_dtype=BF16)[0].shape == (M, 24)


def test_memory_out_of_order_or_out_of_line_is_refused() -> None:
    a, b = operand("bf16", (N, K), 0), operand("bf16", (M, K), 1)
    for wrong in ({"A": a.t().contiguous().t(), "B": b}, {"A": a, "B": b.t().contiguous().t()}):
        with pytest.raises(RuntimeError, match="is not contiguous"):
            generic_gemm(**wrong)
    with pytest.raises(RuntimeError, match="D is not contiguous"):
        generic_gemm(A=a, B=b, D=torch.zeros(N, M).t())
    a, b = operand("e4m3 delayed", (N, K), 0), operand("e4m3 delayed", (M, K), 1)
    a._data = torch.cat([torch.zeros(4, dtype=torch.uint8), a._data.flatten()])[4:].view(N, K)
    with pytest.raises(RuntimeError, match="A of an FP8 GEMM starts 4 bytes past"):
        generic_gemm(A=a, B=b)


def generic_gemm(**options: Any) -> Any:
    """TE's binding with nothing special, apart from `options`."""
    usual = {
        **{"transA": True, "transB": False, "D": None, "quantizer": None, "output_dtype": tex.DType.kFloat32},
        **{"bias": None, "bias_type": tex.DType.kBFloat16, "gelu": False, "gelu_in": None, "grad": False},
        **{"workspace": torch.empty(1), "workspace_size": 1, "accumulate": False, "use_split_accumulator": False},
    }
    return tex.generic_gemm(**{**usual, **options})


@pytest.mark.parametrize("kind", ["bf16", "e4m3 delayed"])
def test_weight_gradients_accumulate_into_main_grad(kind: str) -> None:
    main_grad = torch.full((M, N), 0.25)
    expected = main_grad.double()
    for i in range(3):
        a, b = operand(kind, (K, N), i), operand(kind, (K, M), i + 9)
        result = general_gemm(a, b, out_dtype=torch.float32, layout="NT", out=main_grad, accumulate=True, grad=True)[0]
        assert result is main_grad
        expected = expected + product(a, b, "NT")
    assert_near(main_grad, expected, torch.float32)
    general_gemm(a, b, out_dtype=torch.float32, layout="NT", out=main_grad, accumulate=False)
    assert_near(main_grad, product(a, b, "NT"), torch.float32)


def test_accumulation_into_bf16_rounds_the_sum_once() -> None:
    a, b = operand("bf16", (K, N), 0), operand("bf16", (K, M), 1)
    out = torch.full((M, N), 3.0, dtype=torch.bfloat16)
    general_gemm(a, b, out_dtype=torch.bfloat16, layout="NT", out=out, accumulate=True)
    assert_near(out, product(a, b, "NT") + 3, torch.bfloat16)


def test_alpha_and_beta() -> None:
    a, b, out = operand("bf16", (K, N), 0), operand("bf16", (K, M), 1), torch.full((M, N), 2.0)
    general_gemm(a, b, out_dtype=torch.float32, layout="NT", out=out, accumulate=True, alpha=0.5, beta=3.0)
    assert_near(out, product(a, b, "NT") * 0.5 + 6, torch.float32)


@pytest.mark.parametrize(
    ("kind", "output", "of_bias"),
    [
        *[("bf16", BF16, BF16), ("bf16", FP32, FP32), ("fp32", FP32, FP32), ("fp16", FP16, FP16)],
        *[("e4m3 delayed", BF16, BF16), ("e4m3 delayed", FP32, BF16), ("e4m3 delayed", FP16, FP16)],
    ],
)
def test_bias(kind: str, output: torch.dtype, of_bias: torch.dtype) -> None:
    a, b, bias = operand(kind, (N, K), 0), operand(kind, (M, K), 1), torch.randn(N).to(of_bias)
    assert_near(general_gemm(a, b, out_dtype=output, bias=bias)[0], product(a, b, "TN") + bias.double(), output)


def test_bias_gradient() -> None:
    x, grad = operand("bf16", (K, N), 0), operand("bf16", (K, M), 1)
    out = torch.zeros(M, N)
    _, bias_grad, _, _ = general_gemm(
        x, grad, out_dtype=torch.float32, layout="NT", out=out, accumulate=True, grad=True, bias=torch.ones(M)
    )
    assert_near(bias_grad, numbers(grad).sum(0), torch.float32)
    assert_near(out, product(x, grad, "NT"), torch.float32)


def test_gelu_and_its_gradient() -> None:
    a, b, bias = operand("e4m3 delayed", (N, K), 0), operand("e4m3 delayed", (M, K), 1), torch.randn(N).bfloat16()
    out, _, before, _ = general_gemm(a, b, out_dtype=torch.bfloat16, bias=bias, gelu=True)
    expected = product(a, b, "TN") + bias.double()
    assert_near(before, expected, torch.bfloat16)
    assert_near(out, torch.nn.functional.gelu(expected, approximate="tanh"), torch.bfloat16)
    weight, grad = operand("bf16", (K, N), 2), operand("bf16", (M, K), 3)
    dgrad = general_gemm(weight, grad, out_dtype=torch.float32, layout="NN", gelu=True, gelu_in=before, grad=True)[0]
    x = before.double().requires_grad_()
    torch.nn.functional.gelu(x, approximate="tanh").backward(product(weight, grad, "NN"))
    assert_near(dgrad, x.grad, torch.float32)


def test_delayed_scaling_quantizes_the_accumulators_of_fp8_operands() -> None:
    a, b = operand("e4m3 delayed", (N, K), 0), operand("e4m3 delayed", (M, K), 1)
    quantizer = te.Float8Quantizer(torch.tensor([10.0]), torch.zeros(1), tex.DType.kFloat8E4M3)
    accumulators = general_gemm(a, b, out_dtype=torch.float32)[0]
    result = general_gemm(a, b, out_dtype=torch.bfloat16, quantization_params=quantizer)[0]
    assert (type(result), result.dtype) == (te.Float8Tensor, torch.bfloat16)
    assert quantizer.amax.item() == accumulators.abs().max().item()
    assert torch.equal(result._data, tex.quantize(accumulators, quantizer)._data)


def test_other_quantizers_see_the_rounded_result() -> None:
    a, b = operand("e4m3 current", (N, K), 0), operand("e4m3 current", (M, K), 1)
    quantizer = te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cuda"))
    rounded = general_gemm(a, b, out_dtype=torch.bfloat16)[0]
    result = general_gemm(a, b, out_dtype=torch.bfloat16, quantization_params=quantizer)[0]
    assert torch.equal(result._data, tex.quantize(rounded, quantizer)._data)


def test_delayed_scaling_of_other_operands_sees_the_rounded_result() -> None:
    a, b = operand("bf16", (N, K), 0), operand("bf16", (M, K), 1)
    quantizer = te.Float8Quantizer(torch.tensor([10.0]), torch.zeros(1), tex.DType.kFloat8E4M3)
    result = general_gemm(a, b, out_dtype=torch.bfloat16, quantization_params=quantizer)[0]
    assert quantizer.amax.item() == general_gemm(a, b, out_dtype=torch.bfloat16)[0].abs().max().item()
    assert quantizer.amax.item() != general_gemm(a, b, out_dtype=torch.float32)[0].abs().max().item()
    assert torch.equal(result._data, tex.quantize(general_gemm(a, b, out_dtype=torch.bfloat16)[0], quantizer)._data)


def test_an_output_of_another_shape_or_dtype_is_refused() -> None:
    a, b = operand("bf16", (K, N), 0), operand("bf16", (K, M), 1)
    for out, dtype in [
        (torch.zeros(N, M), torch.float32),
        (torch.zeros(M * N), torch.float32),
        (torch.zeros(M, N), torch.bfloat16),
    ]:
        with pytest.raises(RuntimeError, match="GEMM output has invalid"):
            general_gemm(a, b, layout="NT", out=out, out_dtype=dtype)


def test_empty_operands() -> None:
    none = torch.empty(0, K, dtype=torch.bfloat16)
    assert general_gemm(operand("bf16", (N, K), 0), none, out_dtype=torch.bfloat16)[0].shape == (0, N)
    out = torch.full((M, N), 2.0)
    for accumulate, expected in ((True, 2.0), (False, 0.0)):
        general_gemm(
            torch.empty(0, N), torch.empty(0, M), out_dtype=torch.float32, layout="NT", out=out, accumulate=accumulate
        )
        assert out.unique().tolist() == [expected]


def test_nan_and_infinity_come_through() -> None:
    a, b = torch.eye(16), torch.ones(8, 16)
    b[3, 5] = float("nan")
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), tex.DType.kFloat8E4M3)
    result = general_gemm(tex.quantize(a, quantizer), tex.quantize(b, quantizer), out_dtype=torch.float32)[0]
    assert result.isnan().any(dim=1).nonzero().tolist() == [[3]]


def test_scales_whose_product_overflows() -> None:
    huge = torch.zeros(16, 16)
    huge[0, :] = 3e37
    huge[1, 1] = 3e37
    operands = [tex.quantize(huge, te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cuda")))] * 2
    result = general_gemm(*operands, out_dtype=torch.float32)[0]
    infinite = torch.zeros(16, 16, dtype=torch.bool)
    infinite[:2, :2] = True
    assert torch.equal(result.isinf(), infinite)
    assert not result[~infinite].any()


def test_autocast_does_not_reach_into_the_gemm() -> None:
    a, b = operand("fp32", (N, K), 0), operand("fp32", (M, K), 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(general_gemm(a, b, out_dtype=torch.float32)[0], product(a, b, "TN"), torch.float32)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"32 elements of A \(16, 32\).*64 of B \(48, 64\)"):
        general_gemm(operand("bf16", (N, K), 0), operand("bf16", (M, 64), 1), out_dtype=torch.float32)


def test_overlapped_communication_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="Userbuffers"):
        tex.generic_gemm(
            *(torch.ones(16, 16), True, torch.ones(16, 16), False, None, None, tex.DType.kFloat32, None),
            *(tex.DType.kBFloat16, False, None, False, torch.empty(1), 1, False, False),
            comm_overlap=object(),
            comm_type=tex.CommOverlapType.AG,
        )


def linear(recipe: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    module = te_pytorch.Linear(K, N, params_dtype=torch.bfloat16, device="cuda", **options)
    module.recipe = recipe
    return module


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_linear_computes_with_the_quantized_numbers(name: str, fused: bool) -> None:
    """Output and gradients of te.Linear against float64 on operands quantized apart from TE."""
    recipe = DelayedScaling(amax_history_len=4) if name == "delayed" else Float8CurrentScaling()
    module = linear(recipe, fuse_wgrad_accumulation=fused)
    x = torch.randn(M, K).bfloat16().requires_grad_()
    grad = torch.randn(M, N).bfloat16()
    if fused:
        module.weight.main_grad = torch.full((N, K), 0.5)
    with te_pytorch.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = module(x)
    y.backward(grad)

    def quantized(value: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
        limit = torch.finfo(fp8).max
        value = value.detach().float()
        # Delayed scaling starts at scale 1.
        scale = torch.ones(()) if name == "delayed" else limit / value.abs().max()
        return (value * scale).clamp(-limit, limit).to(fp8).double() * scale.reciprocal().double()

    weight, bias = quantized(module.weight, torch.float8_e4m3fn), module.bias.detach().double()
    inputs, grads = quantized(x, torch.float8_e4m3fn), quantized(grad, torch.float8_e5m2)
    assert_near(y.detach(), inputs @ weight.t() + bias, torch.bfloat16)
    assert_near(x.grad, grads @ weight, torch.bfloat16)
    if fused:
        assert_near(module.weight.main_grad, grads.t() @ inputs + 0.5, torch.float32)
    else:
        assert_near(module.weight.grad, grads.t() @ inputs, torch.bfloat16)
    assert_near(module.bias.grad, grad.double().sum(0), torch.bfloat16)


def test_cached_weights_follow_the_optimizer_step() -> None:
    """The FP8 weight is quantized in a step's first micro-batch, kept in its others, and fresh in the next step."""
    module = linear(Float8CurrentScaling(), bias=False)
    x = torch.randn(M, K).bfloat16()
    results = []
    for first in (True, False, True, False):
        inputs = x.clone().requires_grad_()
        with te_pytorch.fp8_autocast(enabled=True, fp8_recipe=module.recipe):
            y = module(inputs, is_first_microbatch=first)
        y.sum().backward()
        results.append(torch.cat([y.detach().flatten(), inputs.grad.flatten()]))
        with torch.no_grad():
            # After the first of the micro-batches: seen by the next step only.
            module.weight.mul_(-2 if first else 1)
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0] * -2)
    assert torch.equal(results[3], results[2])
