"""The project's architecture as rules over its source; each returns its violations as `path:line: text`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from source_tree import PACKAGE, Module, project_imports

# From the bottom up: a module may import what is on its own layer or below. The longest name that fits counts.
LAYERS: tuple[tuple[str, ...], ...] = (
    (f"{PACKAGE}.config", f"{PACKAGE}.errors", f"{PACKAGE}.extras"),
    (
        f"{PACKAGE}.checkpoint.manifest",
        f"{PACKAGE}.checkpoint.directory",
        f"{PACKAGE}.checkpoint.plain_index",
        f"{PACKAGE}.checkpoint.saved_model",
        f"{PACKAGE}.checkpoint.resume",
        f"{PACKAGE}.precision.policy",
        f"{PACKAGE}.precision.chart",
        f"{PACKAGE}.precision.chart_labels",
        f"{PACKAGE}.precision.chart_rows",
        f"{PACKAGE}.train.state",
        f"{PACKAGE}.planner",
    ),
    (f"{PACKAGE}.device", f"{PACKAGE}.parallel", f"{PACKAGE}.cpu"),
    tuple(f"{PACKAGE}.{part}" for part in ("precision", "model.sharding", "data", "optim", "report", "faults")),
    (f"{PACKAGE}.model", f"{PACKAGE}.checkpoint"),
    (f"{PACKAGE}.train", f"{PACKAGE}.monitors"),
    (
        "pretrain",
        "tools",
        "benchmarks",
        f"{PACKAGE}.__main__",
        *(f"{PACKAGE}.{part}" for part in ("commands", "doctor", "evaluate", "generate", "hf", "prepare")),
    ),
)
# What has to answer on a machine, and in a time, where torch cannot be imported.
COMMAND_LINE = ("pretrain", *(f"{PACKAGE}.commands.{name}" for name in ("train", "train_options", "rank_zero_output")))
TORCH_FREE = (*LAYERS[0], *LAYERS[1], f"{PACKAGE}.data.check_data", f"{PACKAGE}.prepare", *COMMAND_LINE)
HEAVY = ("torch", "megatron", "transformer_engine", "transformer_engine_torch")
KNOWS_CUDA = (f"{PACKAGE}.cpu", f"{PACKAGE}.device")
KNOWS_ENVIRONMENT = (
    *KNOWS_CUDA,
    *(f"{PACKAGE}.{part}" for part in ("parallel", "config.load", "doctor.finding")),
    "benchmarks.processes",
)
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
# Of the package, without tools and tests.
MAX_FILES = 290
MAX_LINES = 40_000
# Names of files that are the same thing in two packages; any other name belongs to one file.
SHARED_NAMES = frozenset(
    {
        *("__init__", "__main__"),
        # A section of the config, and the command or the part of training that it is for.
        *("checkpoint", "environment", "profile"),
        # A command, and what it runs.
        *("evaluate", "plan", "preprocess", "report"),
        # To be renamed.
        *("attention", "build", "memory", "norms", "state"),
    }
)
# Writes to attributes that no class of this project declares, so to objects of other libraries, by the file's path. The
# patches among them are in docs/architecture.md; the others are settings that the library offers as attributes.
FOREIGN_WRITES: dict[str, tuple[str, ...]] = {
    f"{PACKAGE}/commands/main.py": ("sys.argv",),
    f"{PACKAGE}/commands/precision_chart.py": ("table.columns[2].justify",),
    f"{PACKAGE}/data/tokenizer_kinds.py": ("self._tokenizer.encode_special_tokens",),
    # Parameters of one norm for two modules, and constants instead of parameters.
    f"{PACKAGE}/model/block.py": ("setattr(holder)",),
    f"{PACKAGE}/model/block_shape.py": ("delattr(module)",),
    f"{PACKAGE}/model/gpt.py": ("weight.shared_embedding", "weight.zero_out_wgrad", "weight.shared"),
    f"{PACKAGE}/model/layers.py": ("attention.qkv_format",),
    # The one place that completes Megatron's config.
    f"{PACKAGE}/model/megatron_config.py": tuple(
        f"shared.{name}"
        for name in (
            "timers",
            "barrier_with_L1_time",
            "finalize_model_grads_func",
            "no_sync_func",
            "grad_scale_func",
        )
    ),
    f"{PACKAGE}/optim/optimizer.py": ("optimizer.get_grad_norm",),
    f"{PACKAGE}/precision/probe.py": ("plain.optimize_for_gemm",),
    f"{PACKAGE}/precision/tap.py": ("setattr(module)",),
    f"{PACKAGE}/prepare/train_tokenizer.py": ("tokenizer.pre_tokenizer", "tokenizer.decoder"),
}

_CUDA_TEXT = re.compile(r"cuda(:\d*)?")
_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})

Modules = dict[str, Module]


def all_violations(modules: Modules) -> list[str]:
    """Every violation of every rule."""
    found = [*upward_imports(modules), *cycles(modules), *torch_in_torch_free(modules)]
    found += [*shared_names(modules), *package_size(modules)]
    declared = declared_attributes(modules)
    for module in modules.values():
        written = dict(foreign_writes(module, declared))
        reviewed = FOREIGN_WRITES.get(module.path, ())
        found += [text for name, text in written.items() if name not in reviewed]
        found += [f"{module.path}:1: FOREIGN_WRITES lists {name}" for name in reviewed if name not in written]
        found += [*global_statements(module), *cuda_uses(module), *environment_uses(module)]
        found += [*lengths(module), *missing_docstring(module)]
    return found


def upward_imports(modules: Modules) -> Iterator[str]:
    """Imports of something on a higher layer, and modules that are on none."""
    for module in modules.values():
        layer = layer_of(module.name)
        if layer is None:
            if module.name != PACKAGE:
                yield f"{module.path}:1: {module.name} is on no layer: give it a place in LAYERS"
            continue
        for imported, target in project_imports(module, modules):
            target_layer = layer_of(target)
            if target_layer is not None and target_layer > layer:
                yield f"{module.path}:{imported.line}: imports {target}, which is {target_layer - layer} above it"


def layer_of(name: str) -> int | None:
    """The index of a module's layer, or None."""
    fitting = [
        (len(prefix), index) for index, layer in enumerate(LAYERS) for prefix in layer if belongs(name, (prefix,))
    ]
    return max(fitting)[1] if fitting else None


def belongs(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a module is one of `parts` or inside one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def cycles(modules: Modules) -> Iterator[str]:
    """Circles of imports, those inside functions included; each once."""
    graph = {
        name: sorted({target for _, target in project_imports(module, modules)}) for name, module in modules.items()
    }
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            circle = [*path[path.index(name) :], name]
            yield f"{modules[name].path}:1: imports in a circle: {' -> '.join(circle)}"
        elif name not in finished:
            for target in graph[name]:
                yield from visit(target, [*path, name])
            finished.add(name)

    for start in graph:
        yield from visit(start, [])


def torch_in_torch_free(modules: Modules) -> Iterator[str]:
    """Heavy imports that importing a torch-free module brings in, by whatever way."""
    for name, module in modules.items():
        if not belongs(name, TORCH_FREE):
            continue
        if name not in COMMAND_LINE:
            for imported in module.imports:
                if imported.lazy and belongs(imported.name, HEAVY):
                    yield f"{module.path}:{imported.line}: imports {imported.name}, and has to do without"
        for way in heavy_ways(name, modules, [], set()):
            yield f"{module.path}:1: importing it imports {way}, and it has to do without"


def heavy_ways(name: str, modules: Modules, path: list[str], seen: set[str]) -> Iterator[str]:
    """Chains of imports outside functions from a module to a heavy package; the packages above count too."""
    parts = name.split(".")
    for reached in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
        if reached not in modules or reached in seen:
            continue
        seen.add(reached)
        module = modules[reached]
        for imported in module.imports:
            if not imported.lazy and belongs(imported.name, HEAVY):
                yield " -> ".join([*path, reached, imported.name])
        for imported, target in project_imports(module, modules):
            if not imported.lazy:
                yield from heavy_ways(target, modules, [*path, reached], seen)


def global_statements(module: Module) -> Iterator[str]:
    """`global`: state that everything can change."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno}: global {', '.join(node.names)}"


def cuda_uses(module: Module) -> Iterator[str]:
    """`torch.cuda`, `.cuda()`, `.is_cuda` and "cuda" where the kind of device must not be known."""
    if belongs(module.name, KNOWS_CUDA):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"):
            yield f"{module.path}:{node.lineno}: .{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _CUDA_TEXT.fullmatch(node.value):
            yield f"{module.path}:{node.lineno}: {node.value!r}"
    for imported in module.imports:
        if belongs(imported.name, ("torch.cuda",)):
            yield f"{module.path}:{imported.line}: imports {imported.name}"


def environment_uses(module: Module) -> Iterator[str]:
    """`os.environ` and its like outside the modules that may look at the environment."""
    if belongs(module.name, KNOWS_ENVIRONMENT):
        return
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in _ENVIRONMENT
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            yield f"{module.path}:{node.lineno}: os.{node.attr}"
    for imported in module.imports:
        if imported.name in {f"os.{name}" for name in _ENVIRONMENT}:
            yield f"{module.path}:{imported.line}: imports {imported.name}"


def lengths(module: Module) -> Iterator[str]:
    """Files and functions too long to read at once."""
    num_lines = len(module.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{module.path}:1: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            # From the docstring on: signatures that mirror a kernel's of another project are as long as they are.
            length = node.end_lineno - node.body[0].lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{module.path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def missing_docstring(module: Module) -> Iterator[str]:
    """Modules that do not say what they own; an empty one owns nothing."""
    if module.tree.body and not ast.get_docstring(module.tree):
        yield f"{module.path}:1: no module docstring"


def shared_names(modules: Modules) -> Iterator[str]:
    """Files of the package with the name of another one: who looks for one finds the other."""
    first: dict[str, Module] = {}
    for module in modules.values():
        name = module.path.rpartition("/")[2].removesuffix(".py")
        if belongs(module.name, (PACKAGE,)) and name not in SHARED_NAMES:
            other = first.setdefault(name, module)
            if other is not module:
                yield f"{module.path}:1: {other.path} has this name"


def package_size(modules: Modules) -> Iterator[str]:
    """A package of more files or lines than agreed."""
    package = [module for module in modules.values() if belongs(module.name, (PACKAGE,))]
    lines = sum(len(module.text.splitlines()) for module in package)
    if len(package) > MAX_FILES or lines > MAX_LINES:
        yield f"{PACKAGE}:1: {len(package)} files of {lines} lines, at most {MAX_FILES} of {MAX_LINES}"


def declared_attributes(modules: Modules) -> frozenset[str]:
    """Attributes that some class of the project has: annotated in its body, or assigned to `self`."""
    declared = set()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                declared.update(field.id for field in fields if isinstance(field, ast.Name))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                declared.add(node.attr)
    return frozenset(declared)


def foreign_writes(module: Module, declared: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(what is written, violation) of writes to objects of other libraries, outside of the stand-in.

    Such a write is a patch, or a setting that the library offers as an attribute; both are reviewed.
    """
    if not belongs(module.name, (PACKAGE,)) or belongs(module.name, (f"{PACKAGE}.cpu",)):
        return
    for node in ast.walk(module.tree):
        name = ""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            # A name that was imported as a whole is a module, whatever its attribute is called.
            is_module = isinstance(node.value, ast.Name) and any(one.name == node.value.id for one in module.imports)
            if not _is_own(node.value) and (is_module or node.attr not in declared):
                name = ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            name = f"{node.func.id}({ast.unparse(node.args[0])})"
        if name:
            yield name, f"{module.path}:{node.lineno}: writes {name}: a patch, which FOREIGN_WRITES has to list"


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
