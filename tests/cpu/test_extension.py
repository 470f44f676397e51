"""The stand-in as a module: TE's values of enums, every name importable, and an error when one has no kernel."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path
from typing import Any, Union

import pytest

from megatron_fp8.cpu import install

install()

import transformer_engine  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch import constants  # noqa: E402

from megatron_fp8.cpu.extension import build_extension  # noqa: E402


def names_that_transformer_engine_uses() -> set[str]:
    names = set()
    for path in (Path(transformer_engine.__file__).parent / "pytorch").rglob("*.py"):
        text = path.read_text()
        if "transformer_engine_torch" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tex":
                names.add(node.attr)
            if isinstance(node, ast.ImportFrom) and node.module == "transformer_engine_torch":
                names |= {alias.name for alias in node.names}
    return names - {"*"}


def test_every_name_that_transformer_engine_uses_is_there() -> None:
    names = names_that_transformer_engine_uses()
    assert len(names) > 100
    for name in names:
        assert callable(getattr(tex, name)), name


def test_a_name_without_a_kernel_raises_when_called_and_not_before() -> None:
    extension = build_extension()
    stand_in = extension.newton_schulz_of_the_future
    assert stand_in is extension.newton_schulz_of_the_future
    assert Union[stand_in, None]  # noqa: UP007  (TE writes such annotations)
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.newton_schulz_of_the_future has no CPU"):
        stand_in(1, key=2)
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.grouped_mlp_of_the_future\.pack has"):
        extension.grouped_mlp_of_the_future.pack()


@pytest.mark.parametrize(
    "name", ["CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "bulk_overlap_ag_with_external_gemm"]
)
def test_userbuffers_have_no_stand_in(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(tex, name)()


def test_private_names_are_probed_as_usual() -> None:
    assert not hasattr(tex, "__path__")
    assert not hasattr(tex.CommOverlap, "__torch_function__")


def test_enums_have_the_values_of_transformer_engine() -> None:
    assert {m.name: int(m) for m in constants.DType} == {m.name: int(m) for m in tex.DType}
    assert [int(tex.FP8FwdTensors[f"GEMM{i}_{kind}"]) for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")] == [
        *range(9)
    ]
    assert [int(tex.FP8BwdTensors[f"GRAD_{kind}{i}"]) for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT")] == [*range(6)]
    assert tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend == -1
    assert tex.NVTE_QKV_Layout.NVTE_THD_THD_THD == 14
    assert tex.NVTE_QKV_Format.NVTE_THD == 2


def bindings(kind: str) -> dict[str, list[str]]:
    """Rows of `te_bindings.txt` by name: "def" rows hold arguments (`*`: by name from here), "enum" rows values."""
    rows = [line.split() for line in (Path(__file__).parent / "te_bindings.txt").read_text().splitlines()]
    return {row[1]: row[2:] for row in rows if row[0] == kind}


def argument_list(function: Any) -> list[str]:
    """Arguments of a stand-in as `te_bindings.txt` writes them."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        found.append(parameter.name + default)
    return found


@pytest.mark.parametrize("name", bindings("def"))
def test_arguments_and_defaults_are_those_of_the_bindings(name: str) -> None:
    """Nothing may pass here that pybind11 refuses there; what has no stand-in takes nothing at all."""
    stand_in = getattr(tex, name)
    if isinstance(stand_in, type):
        with pytest.raises(NotImplementedError, match=name):
            stand_in()
    else:
        assert argument_list(stand_in) == bindings("def")[name]


def test_the_table_of_bindings_is_whole() -> None:
    with_stand_in = [name for name in bindings("def") if not isinstance(getattr(tex, name), type)]
    assert len(with_stand_in) == 50
    assert len(bindings("enum")) == 15


@pytest.mark.parametrize("name", bindings("enum"))
def test_enums_have_the_names_and_values_of_the_bindings(name: str) -> None:
    expected = dict(value.split("=") for value in bindings("enum")[name])
    assert {member.name: str(int(member)) for member in getattr(tex, name)} == expected


def test_pickled_enums_name_the_extension() -> None:
    data = pickle.dumps(tex.DType.kFloat8E4M3)
    assert b"transformer_engine_torch" in data
    assert b"megatron_fp8" not in data
    assert pickle.loads(data) is tex.DType.kFloat8E4M3
