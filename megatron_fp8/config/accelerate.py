"""Translates a Hugging Face Accelerate YAML into the `precision` section.

Every key of such a file is honoured, or belongs to starting processes (torchrun's matter here), or is named in a
problem. A key that `fp8_config` leaves out has the value that Accelerate's `TERecipeKwargs` gives it, which is not
always ours: there `amax_compute_algo` is most_recent, and evaluation runs outside FP8. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

import yaml

from megatron_fp8.config.problem import Problem
from megatron_fp8.config.source import Source, Written, read_files

_MODES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}

# Keys of `fp8_config`, without the prefix `fp8_` that they may have, and those of the precision section.
_RECIPE_KEYS = {
    "use_autocast_during_eval": "fp8_eval",
    "margin": "fp8_margin",
    "interval": "fp8_interval",
    "format": "fp8_format",
    "amax_history_len": "fp8_amax_history_len",
    "amax_history_length": "fp8_amax_history_len",
    "amax_compute_algo": "fp8_amax_compute_algo",
    "amax_compute_algorithm": "fp8_amax_compute_algo",
    "override_linear_precision": "override_linear_precision",
}
_BACKEND, _MXFP8 = "backend", "use_mxfp8_block_scaling"
_RECIPE_OF_SWITCH = {
    **dict.fromkeys(("true", "yes", "on", "1"), "mxfp8"),
    **dict.fromkeys(("false", "no", "off", "0"), "delayed"),
}
_OTHER_BACKENDS = {
    "enable_fsdp_float8_all_gather": ("AO", "precision.fp8_param_gather=true gathers weights as FP8 bytes"),
    "pad_inner_dim": ("AO", "sizes that FP8 accepts: --check names them"),
    "opt_level": ("MSAMP", "precision.exp_avg_dtype, precision.exp_avg_sq_dtype and precision.main_params_dtype"),
    "optimization_level": ("MSAMP", "precision.exp_avg_dtype, precision.exp_avg_sq_dtype, precision.main_params_dtype"),
}
# What `TERecipeKwargs` does when a key is left out.
_ACCELERATE_DEFAULTS = {
    "fp8_eval": "false",
    "fp8_margin": "0",
    "fp8_interval": "1",
    "fp8_format": "hybrid",
    "fp8_amax_history_len": "1024",
    "fp8_amax_compute_algo": "most_recent",
    "override_linear_precision": "[false, false, false]",
}
_NOT_WITH_MXFP8 = ("fp8_margin", "fp8_interval", "fp8_format", "fp8_amax_history_len", "fp8_amax_compute_algo")

# Where and how processes are started: torchrun's arguments here.
_LAUNCH_KEYS = frozenset(
    "compute_environment distributed_type use_cpu debug num_processes num_machines machine_rank gpu_ids "
    "main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity "
    "mpirun_config tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file commands".split()
)
# What would change the training, and is written in other keys here.
_TRAINING_KEYS = {
    "deepspeed_config": "the keys of parallel and precision",
    "fsdp_config": "parallel.use_distributed_optimizer, which divides masters and moments",
    "megatron_lm_config": "the keys of the same names in model, parallel, training and optimizer",
    "parallelism_config": "parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size",
    "dynamo_config": "nothing: kernels are Transformer Engine's",
    "dynamo_backend": "nothing: kernels are Transformer Engine's",
    "ipex_config": "nothing: CPUs run the stand-in for GPUs",
    "downcast_bf16": "precision.mode",
    "fp16": "mixed_precision: fp16",
}


def read_accelerate(path: str, origin: str) -> Source:
    """Values of the precision section by dotted key, from the Accelerate YAML at `path`, and its mistakes.

    `path`: relative to where the program was started. `origin`: where the path was written.
    """
    file = read_files(path, base_key=None)
    if file.unreadable:
        key = "precision.from_accelerate"
        problems = [Problem(key, path, item.reason, "the path of an Accelerate YAML", origin) for item in file.problems]
        return Source(problems=problems, unreadable=True)
    found = Source(problems=list(file.problems))
    fp8 = {}
    for key, written in file.values.items():
        if key.startswith("fp8_config."):
            fp8[key.removeprefix("fp8_config.")] = written
        elif key == "mixed_precision":
            _mixed_precision(written, found)
        elif key == "fp8_config" and not _is_empty(written):
            reason = "not a mapping of the recipe's keys to values"
            use = "a line fp8_config: and lines such as fp8_format: HYBRID below it, indented"
            found.problems.append(Problem(key, written.text, reason, use, written.origin))
        elif not _is_empty(written):
            found.problems.extend(_top_level(key, written))
    mode = found.values.get("precision.mode")
    _recipe(fp8, path, mode is not None and mode.text == "fp8", found)
    return found


def _mixed_precision(written: Written, found: Source) -> None:
    mode = _MODES.get(_plain(written) if not _is_empty(written) else "no")
    if mode is None:
        reason = "not one of Accelerate's values"
        found.problems.append(Problem("mixed_precision", written.text, reason, " or ".join(_MODES), written.origin))
        return
    found.values["precision.mode"] = _as_written(mode, written.origin)


def _top_level(key: str, written: Written) -> Iterator[Problem]:
    """The problem of a key outside `fp8_config`, if it is one."""
    name = key.partition(".")[0]
    if name in _LAUNCH_KEYS or (name == "downcast_bf16" and _plain(written) in ("no", "false")):
        return
    if name in _TRAINING_KEYS:
        reason = "it changes how Accelerate trains, and is not taken over"
        yield Problem(key, written.text, reason, f"{_TRAINING_KEYS[name]}, and the line left out", written.origin)
        return
    known = ["mixed_precision", "fp8_config", *_LAUNCH_KEYS, *_TRAINING_KEYS]
    yield Problem(key, written.text, "Accelerate has no such key", _nearest(name, known), written.origin)


def _recipe(fp8: dict[str, Written], path: str, is_fp8: bool, found: Source) -> None:
    """The keys of `fp8_config`, and, if the mode is FP8, what it leaves out."""
    names: dict[str, str] = {}
    for key, written in fp8.items():
        name = key.removeprefix("fp8_")
        if name == _BACKEND:
            found.problems.extend(_backend(key, written))
        elif name == _MXFP8:
            _block_scaling(key, written, found)
        elif name not in _RECIPE_KEYS:
            found.problems.extend(_unknown(key, name, written))
        elif (target := _RECIPE_KEYS[name]) in names:
            reason = f"it means the same as fp8_config.{names[target]}, which is there too"
            found.problems.append(Problem(f"fp8_config.{key}", written.text, reason, "one of the two", written.origin))
        elif name == "format" and _plain(written) == "e5m2":
            reason = "E5M2 in the forward pass too: its two mantissa bits are too few to train with, and TE refuses it"
            use = "HYBRID, which has E5M2 in the backward pass"
            found.problems.append(Problem(f"fp8_config.{key}", written.text, reason, use, written.origin))
        else:
            names[target] = key
            if not _is_empty(written):
                found.values[f"precision.{target}"] = written
    if not is_fp8:
        return
    recipe = found.values.get("precision.fp8_recipe")
    for target, text in _ACCELERATE_DEFAULTS.items():
        if recipe is not None and recipe.text == "mxfp8" and target in _NOT_WITH_MXFP8:
            continue
        found.values.setdefault(f"precision.{target}", _as_written(text, f"{path}, Accelerate's default"))


def _backend(key: str, written: Written) -> Iterator[Problem]:
    if _plain(written) != "te":
        reason = "FP8 is Transformer Engine's here; torchao's and MS-AMP's FP8 training compute something else"
        yield Problem(f"fp8_config.{key}", written.text, reason, "TE", written.origin)


def _block_scaling(key: str, written: Written, found: Source) -> None:
    recipe = _RECIPE_OF_SWITCH.get(_plain(written))
    if recipe is not None:
        found.values["precision.fp8_recipe"] = _as_written(recipe, written.origin)
        return
    reason = "neither true nor false"
    found.problems.append(Problem(f"fp8_config.{key}", written.text, reason, "true or false", written.origin))


def _unknown(key: str, name: str, written: Written) -> Iterator[Problem]:
    if name in _OTHER_BACKENDS:
        backend, use = _OTHER_BACKENDS[name]
        reason = f"a setting of the backend {backend}, which is not used here"
    else:
        reason = "Accelerate's Transformer Engine recipe has no such key"
        use = _nearest(name, [_BACKEND, _MXFP8, "fp8_format", *_RECIPE_KEYS])
    yield Problem(f"fp8_config.{key}", written.text, reason, use, written.origin)


def _plain(written: Written) -> str:
    return written.text.strip("'\"").lower()


def _is_empty(written: Written) -> bool:
    return written.text.lower() in ("", "~", "null", "none", "{}", "[]")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return near[0] if near else "the line left out"


def _as_written(text: str, origin: str) -> Written:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert node is not None
    return Written(node, text, origin)
