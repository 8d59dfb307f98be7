"""The rules of docs/architecture.md, held by reading the source as a tree."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "headrace"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT_MODULES = {
    "config", "knobs", "environment", "model_config", "model_spec", "mixers", "feed_forwards", "parameters",
    "layer_parts", "sampling_params", "structured_params", "request", "errors", "step", "hub", "process", "child",
    "output", "speculation", "pooling", "graph_sizes", "cache_groups", "stages", "lora",
}  # fmt: skip
ORDER = [
    "cli", "llm", "advice", "convert", "evaluate", "server", "engine", "structured_outputs", "parsers", "planner",
    "scheduler", "executor", "runner", "spec_decode", "sampling", "models", "layers", "attention", "quantization",
    "distributed", "kernels",
]  # fmt: skip
"""Each may import only what stands below it, and the root modules."""
FORBIDDEN = {("executor", "scheduler"), ("planner", "executor")}
"""Pairs that the order would allow but the design does not: (importer, imported)."""


def folder_of(path: Path) -> str:
    """`headrace/models/llama.py` -> `models`; `headrace/config.py` -> `config`; the package itself -> ``."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem.replace("__init__", "")


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Trees of all files are a million objects, which neither these tests nor those behind them need look through."""
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported_modules(path: Path) -> list[str]:
    """Every absolute module name imported anywhere in the file, inside functions too."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def own_folders(path: Path) -> set[str]:
    parts = (name.split(".") for name in imported_modules(path))
    return {part[1] for part in parts if part[0] == "headrace" and len(part) > 1 and part[1] not in ("__version__",)}


@pytest.mark.parametrize("here", sorted({*map(folder_of, FILES)} - {""}))  # which is the lazy public surface
def test_imports_go_only_downward(here: str) -> None:
    for path in (path for path in FILES if folder_of(path) == here):
        for target in own_folders(path) - {here} - ROOT_MODULES:
            assert here in ORDER, f"root module {here} imports {target}: root modules import only each other"
            assert target in ORDER, f"{path} imports {target}, which has no place in the order"
            assert ORDER.index(target) > ORDER.index(here), f"{path} imports {target}, which stands above it"
            assert (here, target) not in FORBIDDEN, path


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count too; the package itself, whose public surface is lazy, does not."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    del paths["headrace"]
    edges = {name: {*imported_modules(path)} & paths.keys() - {name} for name, path in paths.items()}
    while edges:
        free = {name for name, targets in edges.items() if targets.isdisjoint(edges)}
        assert free, f"circle among {sorted(edges)}"
        edges = {name: targets for name, targets in edges.items() if name not in free}


def test_scheduler_imports_only_root_modules_and_kernels_nothing_of_ours() -> None:
    for path in PACKAGE.glob("scheduler/*.py"):
        assert own_folders(path) <= ROOT_MODULES | {"scheduler"}, path
    for path in PACKAGE.glob("kernels/*.py"):
        assert own_folders(path) <= {"kernels"}, path


def test_nothing_but_the_front_doors_imports_advice() -> None:
    """The engine serves without it: advice is for the command line, and for keywords of vLLM's given to `LLM`."""
    importers = {folder_of(path) for path in FILES if "advice" in own_folders(path)}
    assert importers == {"advice", "cli", "llm"}


def test_no_pickle_no_global_no_environment_outside_its_module() -> None:
    for path in FILES:
        names = {name.split(".")[0] for name in imported_modules(path)}
        assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        for node in ast.walk(tree_of(path)):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: global"
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                assert path.name == "environment.py", f"{path}:{node.lineno}: the environment is read there alone"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}: {node.func.id}"


def narrows(test: ast.expr) -> bool:
    """`x is not None`, `isinstance(x, T)`, or several of them: what tells the type checker that which holds anyway."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(map(narrows, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot)


def test_no_check_goes_away_with_python_O() -> None:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assert):
                assert narrows(node.test), f"{path}:{node.lineno}: assert is for types; raise what must be checked"
            assert not isinstance(node, ast.Name) or node.id != "__debug__", f"{path}:{node.lineno}: __debug__"


def test_no_branch_on_a_family_outside_models() -> None:
    for path in FILES:
        if folder_of(path) in ("models", "model_config"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                assert "model_type" not in text, f"{path}:{node.lineno}: {text}"
                assert ".architecture" not in text, f"{path}:{node.lineno}: {text}"


def test_nothing_is_written_twice_over() -> None:
    for path in FILES:
        assert not path.stem.endswith(("_v2", "_legacy", "_old", "_new")), path


def test_frozen_dataclasses_stay_frozen() -> None:
    """object.__setattr__ is how one would get around it."""
    for path in FILES:
        assert "object.__setattr__" not in path.read_text(), path


TORCH_FREE = ["headrace", "headrace.scheduler.scheduler", "headrace.planner.decisions", "headrace.server.app",
              "headrace.server.run", "headrace.engine.async_engine", "headrace.engine.core_process", "headrace.llm",
              "headrace.cli.main", "headrace.models.registry",
              "headrace.attention.table", "headrace.executor.factory", "headrace.cli.doctor", "headrace.cli.plan",
              "headrace.planner.plan", "headrace.advice.explain.explain", "headrace.advice.flags.table",
              "headrace.planner.simulate", "headrace.parsers.table", "headrace.parsers.output_parser"]  # fmt: skip
WHO_LOADS = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *(name for name in ("torch", "triton", "transformers") if name in sys.modules))
"""


def test_front_ends_load_no_torch() -> None:
    """In a process of their own; the first line that is longer names the module that does."""
    command = [sys.executable, "-c", WHO_LOADS, *TORCH_FREE]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == TORCH_FREE
