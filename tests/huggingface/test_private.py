"""Every private attribute of transformers that is used is in the table, and the table has no others."""

from __future__ import annotations

import ast
import pathlib

import transformers
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMixin

import inertia_fx
from inertia_fx.huggingface.private import PRIVATE

PACKAGE = pathlib.Path(inertia_fx.__file__).parent
THEIRS = (transformers.PreTrainedModel, transformers.PreTrainedConfig, GenerationMixin, Cache, CacheLayerMixin)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def trees(folder: pathlib.Path) -> dict[str, ast.Module]:
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py"))}


def root(node: ast.AST) -> str:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def defined(tree: ast.Module) -> set[str]:
    """Private names that a module makes itself: functions, classes, fields, and what its methods set on self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root(node) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def used(tree: ast.Module) -> set[str]:
    """Private names that a module reads, writes, overrides, or names in a string, but for those of torch's modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root(node) != "torch":
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
        elif isinstance(node, ast.ClassDef):
            names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return {name for name in names if is_private(name)}


def test_the_table_is_what_the_sources_use() -> None:
    ours = set().union(*(defined(tree) for tree in trees(PACKAGE).values()))
    torchs = {"_orig_mod"}  # of torch.compile's wrapper
    found: set[tuple[str, str]] = set()
    for file, tree in trees(PACKAGE / "huggingface").items():
        for name in used(tree) - torchs:
            if name not in ours or any(hasattr(kind, name) for kind in THEIRS):
                found.add((name, pathlib.Path(file).name))
    listed = {(entry.name, file) for entry in PRIVATE for file in entry.where if not file.startswith("..")}
    assert found - {(entry.name, "private.py") for entry in PRIVATE} == listed


def test_what_the_table_lists_is_there() -> None:
    kinds = {kind.__name__: kind for kind in THEIRS}
    for entry in PRIVATE:
        if entry.name != "_is_user_defined":  # set by `generate` on instances
            assert hasattr(kinds[entry.owner], entry.name), entry
        assert all((PACKAGE / "huggingface" / file).is_file() for file in entry.where)


def test_the_walk_sees_what_it_has_to_see() -> None:
    seen = used(
        ast.parse(
            "class A:\n"
            "    def _reorder_cache(self): ...\n"
            "x.config._experts = 1\n"
            "getattr(model, '_is_stateful')\n"
            "torch._dynamo.exc\n"
            "self.__dict__\n"
        )
    )
    assert seen == {"_reorder_cache", "_experts", "_is_stateful"}
