"""Finds calls that run what a file or a text says: unpickling, unsafe YAML, eval, shells. By syntax, not by text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# Each by the end of its dotted name, aliases of imports resolved; how it runs foreign code.
FORBIDDEN = {
    **dict.fromkeys(
        ("pickle.load", "pickle.loads", "pickle.Unpickler", "_pickle.loads", "dill.load", "dill.loads"), "pickle"
    ),
    **dict.fromkeys(
        ("cloudpickle.load", "cloudpickle.loads", "joblib.load", "shelve.open", "pandas.read_pickle"), "pickle"
    ),
    **dict.fromkeys(("torch.serialization.load", "torch.jit.load", "torch.package.PackageImporter"), "pickle"),
    **dict.fromkeys(("marshal.load", "marshal.loads"), "bytecode"),
    **dict.fromkeys(("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"), "YAML tags"),
    **dict.fromkeys(("yaml.full_load", "yaml.full_load_all"), "YAML tags"),
    **dict.fromkeys(("eval", "exec", "compile", "builtins.eval", "builtins.exec", "code.interact"), "code in a text"),
    **dict.fromkeys(("runpy.run_path", "runpy.run_module"), "a script"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "a shell"),
    **dict.fromkeys(("megatron.core.dist_checkpointing.load", "torch.distributed.checkpoint.load"), "pickle"),
    **dict.fromkeys(("torch.distributed.broadcast_object_list", "torch.distributed.all_gather_object"), "pickle"),
    **dict.fromkeys(("torch.distributed.gather_object", "torch.distributed.scatter_object_list"), "pickle"),
    **dict.fromkeys(("torch.distributed.recv_object_list", "torch.distributed.rpc.init_rpc"), "pickle"),
    **dict.fromkeys(("multiprocessing.connection.Listener", "multiprocessing.connection.Client"), "pickle"),
    **dict.fromkeys(("multiprocessing.managers.BaseManager", "multiprocessing.Manager"), "pickle"),
}
UNSAFE_LOADERS = ("Loader", "UnsafeLoader", "FullLoader", "CLoader")


@dataclass(frozen=True)
class Call:
    """A call that is forbidden: the function it is in (or `<module>`), the line, the dotted name, what it would run."""

    function: str
    line: int
    name: str
    runs: str


def forbidden_calls(source: str) -> Iterator[Call]:
    """Every forbidden call of a module, and every other use of such a function: as an argument it is called later."""
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    yield from _visit(tree, "<module>", aliases)


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (name.asname, name.name) if name.asname else (name.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def _visit(node: ast.AST, function: str, aliases: dict[str, str]) -> Iterator[Call]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else function
        if isinstance(child, ast.Call):
            yield from _by_arguments(child, inside, aliases)
        if isinstance(child, (ast.Name, ast.Attribute)) and isinstance(child.ctx, ast.Load):
            name = _dotted(child, aliases)
            if name in FORBIDDEN:
                yield Call(inside, child.lineno, name, FORBIDDEN[name])
                continue
            if name is not None and name.startswith("yaml.") and name.endswith(UNSAFE_LOADERS) and "Safe" not in name:
                yield Call(inside, child.lineno, name, "YAML tags")
        yield from _visit(child, inside, aliases)


def _by_arguments(call: ast.Call, function: str, aliases: dict[str, str]) -> Iterator[Call]:
    """Calls that are safe with the right arguments only."""
    name = _dotted(call.func, aliases) or ""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load" and not _is(arguments.get("weights_only"), True):
        yield Call(function, call.lineno, "torch.load without weights_only=True", "pickle")
    if name == "numpy.load" and ("allow_pickle" in arguments or len(call.args) > 2):
        yield Call(function, call.lineno, "numpy.load with allow_pickle", "pickle")
    if "shell" in arguments and not _is(arguments["shell"], False):
        yield Call(function, call.lineno, f"{name} with shell", "a shell")
    if "trust_remote_code" in arguments and not _is(arguments["trust_remote_code"], False):
        yield Call(function, call.lineno, f"{name} with trust_remote_code", "a repository's code")


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """The whole dotted name of an expression; None where it is no chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)])
