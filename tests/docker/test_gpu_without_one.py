"""What docs/gpu.md says about GPUs, held against the configs, and against the libraries where these are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.attention import HOPPER_ATTENTION, in_documents, unfused_attention
from megatron_fp8.config.check import fitting_world_sizes
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from tools import attention_backends, attention_forms, library_order

ROOT = Path(__file__).resolve().parents[2]
needs_libraries = pytest.mark.skipif(
    attention_backends.missing() is not None, reason="the GPU image's packages are not installed (locks/gpu.lock)"
)


def told() -> dict[str, list[str]]:
    """The rows of the table in the docs, by config."""
    lines = attention_backends.in_docs(attention_backends.PAGE.read_text(encoding="utf-8")).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_the_table_of_attention_has_every_config_as_it_is() -> None:
    found = told()
    assert list(found) == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    for one in attention_backends.attentions():
        shape = [f"{one.heads} / {one.groups} x {one.head_dim}", f"{one.batch} x {one.seq_length}", f"{one.dropout:g}"]
        assert found[one.config][:3] == shape, f"{one.config}: python tools/attention_backends.py --write"


def choice(config: Config, **changes: dict[str, Any]) -> str:
    """What `config/attention.py` says of an H100, as the table has it."""
    for section, values in changes.items():
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
    layout = derive_layout(config, next(iter(fitting_world_sizes(config))), 32000)
    unfused = unfused_attention(config, layout, HOPPER_ATTENTION)
    if unfused is None:
        return "cuDNN"
    # The table counts documents, and so begins with one where the micro-batch has more samples.
    return f"cuDNN up to {in_documents(unfused.beyond)}, then unfused" if unfused.beyond else "unfused"


def test_warnings_and_plans_know_attention_as_the_table_has_it() -> None:
    found = told()
    for path in (ROOT / "configs").glob("*.yaml"):
        config = load_config(str(path), []).config
        deterministic, apart = {"deterministic_mode": True}, {"reset_attention_mask": True}
        as_it_is = {"training": {"deterministic_mode": False}, "data": {"reset_attention_mask": False}}
        choices = [
            choice(config, **as_it_is),
            choice(config, **{**as_it_is, "data": apart}),
            choice(config, **{**as_it_is, "training": deterministic}),
            choice(config, training=deterministic, data=apart),
            choice(config, **as_it_is, precision={"mode": "fp32"}),
        ]
        assert choices == found[path.stem][3:], path.stem


def answer_as_cudnn_does(fields: dict[str, float]) -> tuple[int, str]:
    """cuDNN's rule for the head dimension, the only one by which it refuses a config of ours."""
    fits = fields["head_dim_qk"] % 8 == 0 and fields["head_dim_qk"] <= 256
    return (1, "") if fits else (-1, "head dimension")


def test_transformer_engine_chooses_what_the_table_says_for_cudnns_answers() -> None:
    found = told()
    # The smallest, and the one in which documents change most.
    for one in attention_backends.attentions():
        if one.config in ("quickstart", "llama_1b_fp8"):
            choices = [attention_backends.chosen(one, answer_as_cudnn_does, None, flag) for flag in (False, True)]
            apart = [attention_backends.packed(one, answer_as_cudnn_does, flag) for flag in (False, True)]
            single = attention_backends.chosen(one, answer_as_cudnn_does, None, False, "float32")
            assert [choices[0], apart[0], choices[1], apart[1], single] == found[one.config][3:]


def test_a_head_dimension_that_cudnn_refuses_goes_unfused() -> None:
    large = attention_backends.Attention("large", 4, 4, 512, 128, 1, 0.0)
    assert attention_backends.chosen(large, answer_as_cudnn_does, None, False) == "unfused"


@needs_libraries
def test_the_libraries_give_the_table_of_the_docs() -> None:
    from megatron_fp8 import cpu

    cpu.install()
    answers = attention_backends.Answers()
    try:
        table = attention_backends.markdown(attention_backends.rows(answers.ask))
    finally:
        answers.close()
    assert attention_backends.in_docs(attention_backends.PAGE.read_text(encoding="utf-8")) == table


def test_forms_of_attention_are_fused_by_the_stand_in_as_the_docs_say() -> None:
    """Transformer Engine's own selection, with the stand-in's answers for cuDNN's."""
    from megatron_fp8 import cpu

    cpu.install()
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.attention.dot_product_attention.utils import FusedAttentionParams

    answer = tex.get_fused_attn_backend

    def ask(fields: dict[str, float]) -> tuple[int, str]:
        backend, reason = answer(FusedAttentionParams(**fields))
        return int(backend), reason

    assert attention_forms.in_docs() == attention_backends.markdown(attention_forms.rows(ask))


@needs_libraries
def test_the_libraries_give_the_table_of_forms() -> None:
    from megatron_fp8 import cpu

    cpu.install()
    answers = attention_backends.Answers()
    try:
        table = attention_backends.markdown(attention_forms.rows(answers.ask))
    finally:
        answers.close()
    assert attention_forms.in_docs() == table


@needs_libraries
def test_cudnn_refuses_what_an_h100_cannot_and_says_why() -> None:
    common = {"is_training": 1, "attn_mask_type": 2, "window_size_left": -1, "window_size_right": 0, "qkv_layout": 4}
    kinds = dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), 6)
    sizes = {"batch_size": 2, "num_attn_heads": 16, "num_gqa_groups": 8, "max_seqlen_q": 4096, "max_seqlen_kv": 4096}
    asked = {**common, **kinds, **sizes, "o_format": 0, "do_format": 0, "dqkv_layout": 4, "attn_scale": 0.1}
    answers = attention_backends.Answers()
    try:
        told = {dim: answers.ask({**asked, "head_dim_qk": dim, "head_dim_v": dim}) for dim in (64, 128, 260, 512)}
        single = answers.ask({**asked, **dict.fromkeys(kinds, 4), "head_dim_qk": 64, "head_dim_v": 64})
    finally:
        answers.close()
    assert [told[dim] for dim in (64, 128)] == [(1, ""), (1, "")]
    assert "multiple of 8" in told[260][1]
    assert "less than or equal to 256" in told[512][1]
    assert (single[0], "Unsupported QKV dtype" in single[1]) == (-1, True)


@needs_libraries
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
@pytest.mark.slow
def test_libraries_load_in_every_order_and_a_second_copy_is_seen(tmp_path: Path) -> None:
    for order in library_order.ORDERS:
        well, text = library_order.load(order, [])
        assert well, f"{order}: {text}"
    # Transformer Engine alone finds NCCL by the loader's path.
    shutil.copy(library_order.PACKAGES / "nvidia" / "nccl" / "lib" / "libnccl.so.2", tmp_path)
    well, text = library_order.load("Transformer Engine, then torch", [tmp_path])
    assert not well
    assert str(tmp_path / "libnccl.so.2") in text


def test_the_images_loader_is_given_what_the_trial_gives(tmp_path: Path) -> None:
    """docker/Dockerfile's line, carried out on a tree as the image has it."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "ld.so.conf.d" in line)
    command = line.removeprefix("RUN ").rstrip(" \\").partition(" > ")[0]
    packages = tmp_path / "opt/venv/lib/python3.12/site-packages"
    for name in ("cu13/lib", "cudnn/lib", "nccl/lib", "nccl/include"):
        (packages / "nvidia" / name).mkdir(parents=True)
    shown = subprocess.run(
        ["bash", "-c", command.replace("/opt/venv", str(tmp_path / "opt/venv"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [Path(path) for path in shown.stdout.split()] == library_order.library_directories(packages)
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64" in text


def test_nothing_in_the_gpu_image_brings_a_second_copy_of_a_library() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert "BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04\n" in text
    assert "NVTE_BUILD_USE_NVIDIA_WHEELS=1" in text
    packages = text.partition("--no-install-recommends")[2].partition("&&")[0].split()
    assert not [name for name in packages if name.startswith(("cuda", "libcu", "libnccl", "libnv", "nvidia"))]
