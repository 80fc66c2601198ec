"""What readers copy: links lead somewhere, examples in the text are Python, and README's run."""

from __future__ import annotations

import ast
import importlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import inertia_fx
from tests.common import models

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "passes/*.md", "kernels/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> dict[str, str]:
    """Python in a page, by the heading it stands under; several under one heading are one block."""
    blocks: dict[str, str] = {}
    for section in re.split(r"^#+ ", text_of(page), flags=re.MULTILINE):
        for code in _PYTHON.findall(section):
            heading = section.splitlines()[0]
            blocks[heading] = blocks.get(heading, "") + code
    return blocks


def anchors(page: str) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def ours(code: str) -> Iterator[tuple[str, str | None]]:
    """(module, name or None) of every import of ours."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "inertia_fx")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "inertia_fx":
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/SPEC.md", "docs/VERIFY.md"} <= set(PAGES)
    assert len(python_blocks("README.md")) == len(README)
    assert {"README.md", "docs/VERIFY.md"} <= {
        page for page in PAGES if list(ours("".join(python_blocks(page).values())))
    }


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    for target in _LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(file.resolve().relative_to(ROOT).as_posix())):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_its_imports_of_ours_exist(page: str) -> None:
    for heading, code in python_blocks(page).items():
        compile(code, f"{page}: {heading}", "exec")
        for module, name in ours(code):
            found = importlib.import_module(module)
            if name is not None and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")


def test_readme_fits_into_80_columns() -> None:
    prose = re.sub(r"^\|.*$", "", text_of("README.md"), flags=re.MULTILINE)  # tables are one line a row
    assert [line for line in prose.splitlines() if len(line) > 80] == []


# ---------------------------------------------------------------------- README's examples, as they stand


TEXT = " ".join(str(token) for token in models.prompt(90))


def tokenizer() -> Any:
    """Return a tokenizer whose words are the numbers of the tiny models' vocabulary."""
    words = tokenizers.Tokenizer(WordLevel({str(token): token for token in range(models.VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    names = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", model_input_names=names)


def model_on_disk(folder: pathlib.Path) -> dict[str, Any]:
    models.llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return {"name": str(folder), "text": TEXT}


def compiled_model(folder: pathlib.Path) -> dict[str, Any]:
    """What README's first example leaves behind."""
    model = inertia_fx.compile(models.llama(), backend="eager")
    words = tokenizer()
    return {
        "inertia_fx": inertia_fx,
        "model": model,
        "inputs": words(TEXT, return_tensors="pt"),
        "tokenizer": words,
        "text": TEXT,
    }


def own_decoder(folder: pathlib.Path) -> dict[str, Any]:
    """The example's decoder; `examples` is on the path."""
    decoder = importlib.import_module("own_decoder").Decoder
    torch.manual_seed(0)
    text = torch.randint(100, (2, 90))
    place = {"token": torch.tensor([[7], [8]]), "position": torch.full((2, 1), 90)}
    return place | {"model": decoder().eval(), "text": text, "rows": 2, "tokens": 90}


README: dict[str, tuple[Callable[[pathlib.Path], dict[str, Any]], dict[str, str], str]] = {
    "First use": (
        model_on_disk,
        {"alpha=0.8)": 'alpha=0.8, backend="eager")', "max_new_tokens=200": "max_new_tokens=8"},
        "type(model).__name__ == 'LlamaForCausalLM' and model.dtype == torch.bfloat16",
    ),
    "What you can set": (
        compiled_model,
        {},
        "[len(kept) for kept in cache.retained_positions()] == cache.budget == [64]",
    ),
    "In your own torch.compile workflow": (
        own_decoder,
        {"graph_options(score=True)": 'graph_options(score=True) | {"backend": "eager"}'},
        "[len(kept) for kept in cache.retained_positions()] == [64, 64]"
        " and torch.allclose(logits[:, -1], model.text(torch.cat([text, token], dim=1)), atol=1e-4)",
    ),
    "Is it right, on your model?": (compiled_model, {"steps=64": "steps=8"}, "report.ok"),
    "When something looks wrong": (compiled_model, {}, "sorted(os.listdir('graphs'))[:2] == ['after.py', 'before.py']"),
}
"""For each heading with Python under it: what the reader has by then, what is replaced so that nothing takes long,
and what must hold afterwards."""


@pytest.mark.parametrize("heading", README)
def test_readme_runs(heading: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, replacements, holds = README[heading]
    code = python_blocks("README.md")[heading]
    for old, new in replacements.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    namespace = prepare(tmp_path)
    exec(compile(code, f"README.md: {heading}", "exec"), namespace)
    assert eval(holds, {"torch": torch, "os": os} | namespace)
