"""What the stand-in of `transformer_engine_torch` lacks says so by name, and only when it is called."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformer_engine_torch as tex

from megatron_fp8.cpu.extension import build_extension


@pytest.mark.parametrize("name", ["te_general_grouped_gemm", "CommOverlap", "CommOverlapP2P", "no_such_kernel"])
def test_a_missing_name_raises_when_called(name: str) -> None:
    missing = getattr(tex, name)
    with pytest.raises(NotImplementedError, match=f"transformer_engine_torch.{name} "):
        missing(1, option=2)


def test_a_name_inside_a_missing_name_space() -> None:
    with pytest.raises(NotImplementedError, match=r"grouped_mlp_experimental\.some_kernel"):
        tex.grouped_mlp_experimental.some_kernel(1)


def test_missing_names_work_in_annotations_and_type_checks() -> None:
    assert not isinstance(torch.zeros(1), tex.CommOverlapHelper)
    assert tex.CommOverlap | None is not None
    assert tex.CommOverlap is tex.CommOverlap


def test_private_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="__path__"):
        _ = tex.__path__


@pytest.mark.parametrize("overlap", [{"comm_overlap": object()}, {"bulk_overlap": True}])
def test_overlapped_gemms_raise(overlap: dict) -> None:
    a, workspace = torch.ones(8, 8), torch.empty(0)
    with pytest.raises(NotImplementedError, match="overlapped communication"):
        tex.generic_gemm(
            a,
            True,
            a,
            False,
            None,
            None,
            None,
            None,
            tex.DType.kBFloat16,
            False,
            None,
            False,
            workspace,
            0,
            False,
            False,
            **overlap,
        )


def test_enums_are_numbers_and_pickle_under_the_extensions_name() -> None:
    assert tex.DType.kFloat8E4M3 == 7
    assert b"transformer_engine_torch" in pickle.dumps(tex.DType.kFloat8E5M2)
    assert pickle.loads(pickle.dumps(tex.DType.kFloat8E5M2)) is tex.DType.kFloat8E5M2


def test_every_build_has_the_same_kernels() -> None:
    again = build_extension()
    assert again is not tex
    assert again.generic_gemm is tex.generic_gemm
