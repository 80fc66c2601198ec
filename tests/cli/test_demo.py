"""`inertia-fx demo`: its prompt, its two runs, what it prints and draws, what it refuses."""

from __future__ import annotations

import pathlib

import pytest
import torch

import inertia_fx
from inertia_fx.cli import checkpoint, commands, demo, picture
from inertia_fx.errors import ConfigError
from tests.common.commands import TEMPLATE, invoke, save_tiny, tokenizer
from tests.common.models import tiny


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    return save_tiny(tmp_path / "tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_demo_prints_one_table_and_draws(
    folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(demo, "sensible_dtype", lambda device: dtype)  # which of them depends on the machine
    file = tmp_path / "kept.png"
    result = invoke("demo", "--model", folder, "--tokens", "800", "--backend", "eager", "--picture", str(file))
    assert result.exit_code == 0, result.output
    prompt = len(demo.build_prompt(tokenizer(TEMPLATE), 800).ids)
    full = prompt + demo.WARM_UP + demo.TIMED
    budget = prompt // 10
    per_token = 2 * 2 * 2 * 16 * dtype.itemsize / 2**20  # layers, K and V, heads, width, bytes
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    cells = {name: [cell.strip() for cell in line.split("│")[2:-1]] for name, line in rows.items()}
    assert list(cells) == ["full cache", "inertia_fx"]
    assert cells["full cache"][1:3] == [f"{full:,}", f"{full * per_token:.1f}"]
    assert cells["inertia_fx"][1:3] == [f"{budget:,}", f"{(budget + 1) * per_token:.1f}"]
    for answer, _, _, milliseconds, _ in cells.values():
        assert answer.startswith("✗ ")  # random weights
        assert float(milliseconds) > 0
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80
    assert result.stdout.splitlines()[-1].endswith(str(file))
    from matplotlib.image import imread

    pixels = imread(file)
    assert pixels.shape[:2] == (700, 1200)
    colours = {tuple(colour) for colour in (pixels[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    kept = [tuple(int(code[place : place + 2], 16) for place in (1, 3, 5)) for code in picture._KEPT.values()]
    assert set(kept) <= colours


def test_table_of_right_and_wrong_answers() -> None:
    right = demo.Run(f"{demo.NUMBER}. It is a", True, [1], 1231, 54 << 20, 70.04, 61.2, [])
    wrong = demo.Run("a number\nthat nobody can remember", False, [1], 120, 5 << 20, 50.06, 0.2, [[1]])
    config = inertia_fx.Config()
    table = commands._table(demo.Result(demo.Prompt([1], range(1)), config, right, wrong, []), unicode=True)
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
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("a model was loaded"))
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
    model, words = checkpoint.load(None, demo.sensible_dtype("cpu"))
    config = demo.check(ratio=0.9, alpha=0.8, tokens=700, backend="eager")
    result = demo.run(model, words, config, tokens=700, backend="eager")
    assert result.full.right, result.full.answer
    assert result.inertia.right, result.inertia.answer
    assert result.inertia.cached == len(result.prompt.ids) // 10
