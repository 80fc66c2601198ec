"""Every private interface of torch that the library uses is in docs/PRIVATE_INTERFACES.md, and nothing else is."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "PRIVATE_INTERFACES.md"
ROOMS = ("inertia_fx", "passes", "kernels", "verify")


class Accesses(ast.NodeVisitor):
    """Collect the dotted names under torch that a module reads, through its imports and their aliases."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, str]] = [{}]
        self.found: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._bind(alias.asname or "torch", alias.name if alias.asname else "torch")
                self.found.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.level == 0 and (node.module or "").split(".")[0] == "torch":
                self._bind(alias.asname or alias.name, f"{node.module}.{alias.name}")
                self.found.add(f"{node.module}.{alias.name}")

    def _bind(self, name: str, path: str) -> None:
        self.scopes[-1][name] = path

    def _visit_scope(self, node: ast.AST) -> None:
        self.scopes.append(dict(self.scopes[-1]))
        self.generic_visit(node)
        self.scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _visit_scope

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self.scopes[-1]:
            self.found.add(".".join([self.scopes[-1][inner.id], *reversed(names)]))
        else:
            self.generic_visit(node)


def private_interfaces(source: str) -> set[str]:
    """Return the private ones among them, each in its longest form: a module is listed by what is used of it."""
    accesses = Accesses()
    accesses.visit(ast.parse(source))
    longest = {name for name in accesses.found if not any(other.startswith(f"{name}.") for other in accesses.found)}
    return {name for name in longest if re.search(r"\._(?!_)", name)}


def uses() -> dict[str, set[str]]:
    """Return interface -> folders that use it."""
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            for name in private_interfaces(file.read_text()):
                found.setdefault(name, set()).add(file.parent.relative_to(ROOT).as_posix())
    return found


def listed(heading: str) -> dict[str, tuple[set[str], list[str]]]:
    """Return the table below a heading: interface -> (folders, the other cells)."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", TABLE.read_text(), flags=re.MULTILINE | re.DOTALL)
    rows = {}
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        interface, folders, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
        assert interface not in rows, f"{interface} is listed twice"
        rows[interface.strip("`")] = ({folder.strip(" `") for folder in folders.split(",")}, rest)
    return rows


def row(interface: str, folders: set[str], rest: list[str]) -> str:
    return " | ".join([f"| `{interface}`", ", ".join(sorted(folders)), *rest]).strip() + " |"


def test_the_table_lists_what_is_used() -> None:
    used, table = uses(), listed("Torch")
    problems = []
    for name in sorted(used.keys() | table.keys()):
        if name not in table:
            line = row(name, used[name], ["WHY NO PUBLIC ONE DOES", "VERSIONS"])
            problems.append(f"{name} is used and not listed. Is there a public one? If not, add this line:\n{line}")
        elif name not in used:
            problems.append(f"{name} is listed and not used any more: remove its line")
        elif used[name] != table[name][0]:
            problems.append(f"{name} is used elsewhere: its line should be\n{row(name, used[name], table[name][1])}")
    assert not problems, f"{TABLE.relative_to(ROOT)}, section Torch:\n" + "\n".join(problems)


def test_every_line_says_why_and_which_versions() -> None:
    for heading in ("Torch", "Attributes of torch's objects"):
        for interface, (_, rest) in listed(heading).items():
            assert len(rest) == 2 and len(rest[0]) > 10, f"{interface}: why does no public interface do?"
            assert re.fullmatch(r"2\.\d+( to 2\.\d+)?", rest[1]), f"{interface}: which versions have it?"


def test_attributes_that_are_listed_are_used() -> None:
    """Which class an attribute belongs to cannot be read off the source: the list is kept by hand, this keeps it short."""
    for name, (folders, _) in listed("Attributes of torch's objects").items():
        attribute = name.split(".")[-1]
        assert attribute.startswith("_")
        for folder in folders:
            sources = [file.read_text() for file in (ROOT / folder).glob("*.py")]
            assert any(re.search(rf"\b{attribute}\b", source) for source in sources), f"{name} is not used in {folder}"


@pytest.mark.parametrize(
    ("source", "expect"),
    [
        ("import torch\ntorch._dynamo.config.disable", {"torch._dynamo.config.disable"}),
        ("import torch as t\nt._C._x()", {"torch._C._x"}),
        ("from torch._dynamo import guards\nguards.build()", {"torch._dynamo.guards.build"}),
        ("from torch._dynamo.guards import build as b\nb()", {"torch._dynamo.guards.build"}),
        ("from torch.fx import _config", {"torch.fx._config"}),
        ("from torch import _dynamo as d\nd.a.b", {"torch._dynamo.a.b"}),
        ("def f():\n    from torch import _a as x\n    x.b\ndef g(x):\n    x.c", {"torch._a.b"}),
        ("import torch\ntorch.compile\ntorch.Tensor.__add__", set()),
        ("from torchvision import _x\nself._torch._x", set()),
        ("import torch._inductor.config\ntorch._inductor.config.patch({})", {"torch._inductor.config.patch"}),
        ("import torch\nf(torch.ops.aten._x)(torch._y).z", {"torch.ops.aten._x", "torch._y"}),
    ],
)
def test_private_interfaces_are_found(source: str, expect: set[str]) -> None:
    assert private_interfaces(source) == expect
