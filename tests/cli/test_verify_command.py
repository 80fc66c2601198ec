"""`inertia-fx verify`: what it hands to `check`, what it refuses before anything is loaded, what it leaves behind."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

import pytest

import inertia_fx
from inertia_fx.cli import checkpoint, demo
from inertia_fx.errors import InputError
from inertia_fx.verify import Report
from tests.common.commands import TEMPLATE, invoke, save_tiny, tokenizer
from tests.common.reports import FINDINGS, VIOLATION, fake, row

TEXT = "The grass is green. The sky is blue."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Llama with a chat tokenizer, as it would be on disk."""
    return save_tiny(tmp_path_factory.mktemp("verify") / "tiny")


class Check:
    """Stands in for `inertia_fx.verify.check` and remembers what it was given."""

    def __init__(self) -> None:
        self.report = fake(row(steps=4))
        self.calls: list[dict[str, Any]] = []
        self.model: Any = None

    def __call__(self, model: Any, inputs: Any, *, steps: int = 64, on_progress: Any = None, **settings: Any) -> Report:
        on_progress("checking something")
        self.model = model
        self.calls.append({"inputs": inputs, "steps": steps} | settings)
        return self.report

    def given(self) -> dict[str, Any]:
        """The arguments of the only call, without the token ids."""
        (call,) = self.calls
        return {name: value for name, value in call.items() if name != "inputs"}

    def ids(self) -> list[int]:
        """The token ids of the only call, which has one row."""
        (call,) = self.calls
        (ids,) = call["inputs"].tolist()
        return ids


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    stand_in = Check()
    monkeypatch.setattr(inertia_fx.verify, "check", stand_in)
    return stand_in


# ---------------------------------------------------------------------- what is checked


def test_without_options_the_needle_prompt_and_no_settings(folder: str, check: Check) -> None:
    result = invoke("verify", "--model", folder)
    assert result.exit_code == 0, result.output
    assert check.given() == {"steps": 64}
    assert check.ids() == demo.build_prompt(tokenizer(TEMPLATE), 1000).ids
    assert check.model._inertia.compiler.backend == "eager"
    assert check.model._inertia.config == inertia_fx.Config()
    assert "checking something" in result.stderr
    assert "checking something" not in result.stdout


def test_only_settings_that_were_given_are_passed(folder: str, check: Check) -> None:
    arguments = "--steps 7 --tokens 200 --ratio 0.8 --alpha 0.7 --refresh-every 4 --evict-after 2 --min-budget 20"
    arguments += " --scorer vnorm --pool-width 3 --protect-first 1 --protect-recent 2 --alpha-time 0 --alpha-layer 1"
    result = invoke("verify", "--model", folder, "--backend", "eager", *arguments.split())
    assert result.exit_code == 0, result.output
    assert check.given() == {
        "steps": 7,
        "ratio": 0.8,
        "alpha": 0.7,
        "refresh_every": 4,
        "evict_after": 2,
        "min_budget": 20,
        "scorer": "vnorm",
        "pool_width": 3,
        "protect_first": 1,
        "protect_recent": 2,
        "alpha_time": 0.0,
        "alpha_layer": 1.0,
    }
    assert check.ids() == demo.build_prompt(tokenizer(TEMPLATE), 200).ids
    assert check.model._inertia.compiler.backend == "eager"


def test_never_refreshing_is_passed_as_none(folder: str, check: Check) -> None:
    settings = ["--refresh-every", "never", "--budget", "30", "--aggregator", "cumulative"]
    assert invoke("verify", "--model", folder, *settings).exit_code == 0
    assert check.given() == {"steps": 64, "refresh_every": None, "budget": 30, "aggregator": "cumulative"}


def test_prompt_is_tokenised_as_it_stands(folder: str, check: Check) -> None:
    assert invoke("verify", "--model", folder, "--prompt", TEXT).exit_code == 0
    assert check.ids() == tokenizer().encode(TEXT)  # and no "user ... assistant" of the chat template


def test_prompt_from_a_file_keeps_its_line_ends(
    folder: str, check: Check, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Words:
        def __call__(self, text: str) -> Any:
            seen.append(text)
            return tokenizer()(text)

    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda *arguments: (load(*arguments)[0], Words()))
    (tmp_path / "prompt.txt").write_bytes(b"The gr\xc3\xa4ss\r\nis green.\n")
    result = invoke("verify", "--model", folder, "--prompt-file", str(tmp_path / "prompt.txt"))
    assert result.exit_code == 0, result.output
    assert seen == ["The gräss\r\nis green.\n"]
    assert len(check.ids()) == 5


# ---------------------------------------------------------------------- what it leaves behind


def test_report_json_and_pictures(folder: str, check: Check, tmp_path: pathlib.Path) -> None:
    json, plots = tmp_path / "report.json", tmp_path / "new" / "plots"
    result = invoke("verify", "--model", folder, "--prompt", TEXT, "--json", str(json), "--plots", str(plots))
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "model     LlamaForCausalLM, 134.5 M parameters, float32, backend inductor"
    assert lines[-3:] == [
        "✓ No violation of the contract: 4 clauses checked.",
        f"JSON: {json}",
        f"Pictures: {plots}",
    ]
    assert Report.from_json(json.read_text(encoding="utf-8")) == check.report
    assert sorted(path.name for path in plots.iterdir()) == [
        "churn.png",
        "divergence.png",
        "ranking.png",
        "retention.png",
    ]


def test_violation_is_printed_saved_and_the_exit_status(folder: str, check: Check, tmp_path: pathlib.Path) -> None:
    check.report = fake(row(steps=4), findings=[*FINDINGS, VIOLATION])
    result = invoke("verify", "--model", folder, "--prompt", TEXT, "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    assert "✗ The contract is violated: 1 of 5 clauses." in result.stdout
    assert Report.from_json((tmp_path / "report.json").read_text(encoding="utf-8")) == check.report


def test_report_is_printed_before_a_file_fails(
    folder: str, check: Check, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Report, path: pathlib.Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Report, "save", full)
    result = invoke("verify", "--model", folder, "--prompt", TEXT, "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 2
    assert "No violation of the contract" in result.stdout
    assert "report.json cannot be written: [Errno 28] No space left on device" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_real_check_of_a_tiny_model(folder: str, tmp_path: pathlib.Path) -> None:
    arguments = ["--steps", "3", "--prompt", TEXT, "--budget", "4", "--backend", "eager"]
    result = invoke("verify", "--model", folder, *arguments, "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    report = Report.from_json((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.ok
    assert report.settings == "Config(budget=4)"
    assert [len(kept) for kept in report.rows[0].retained] == [4, 4, 4]


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "1.5"], "ratio=1.5 is outside [0, 1)"),
        (["--ratio", "0.5", "--budget", "10"], "ratio=0.5 and budget=10 both say"),
        (["--alpha", "1"], "alpha=1.0 is outside [0, 1)"),
        (["--scorer", "nonsense"], "scorer='nonsense' is unknown"),
        (["--aggregator", "nonsense"], "aggregator='nonsense' is unknown"),
        (["--refresh-every", "0"], "refresh_every=0 is below 1"),
        (["--refresh-every", "often"], "refresh-every='often' is neither a whole number nor \"never\""),
        (["--backend", "nonsense"], "backend='nonsense' is unknown"),
        (["--steps", "0"], "steps=0 is below 1"),
        (["--tokens", "20"], "tokens=20 is too short"),
        (["--prompt", "a", "--prompt-file", "b"], "prompt and prompt-file exclude each other"),
        (["--prompt", "a", "--tokens", "500"], "tokens=500 is the length of the needle prompt"),
        (["--prompt-file", "no/such/file"], "prompt-file=no/such/file cannot be read"),
        (["--prompt-file", "latin.txt"], "prompt-file=latin.txt cannot be read as UTF-8 text"),
        (["--json", "no/such/folder/a.json"], "json=no/such/folder/a.json is not a file in an existing folder"),
        (["--json", "."], "json=. is not a file in an existing folder"),
        (["--plots", "latin.txt"], "plots=latin.txt is a file, or below one"),
        (["--plots", "latin.txt/plots"], "plots=latin.txt/plots is a file, or below one"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"gr\xe4ss")
    result = invoke("verify", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("option", ["--json", "--plots"])
def test_protected_places_are_refused(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    result = invoke("verify", option, str(tmp_path / "new"))
    assert result.exit_code == 2
    assert f"{option.removeprefix('--')}={tmp_path / 'new'} cannot be written to" in result.stderr


def test_prompts_that_the_model_cannot_take(folder: str, check: Check) -> None:
    result = invoke("verify", "--model", folder, "--prompt", "")
    assert result.exit_code == 2
    assert "The prompt has no tokens" in result.stderr
    assert check.calls == []


def test_error_of_the_check_is_one_message(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Report:
        raise InputError("3 of 128 values of the logits are not finite")

    monkeypatch.setattr(inertia_fx.verify, "check", broken)
    result = invoke("verify", "--model", folder, "--prompt", TEXT)
    assert result.exit_code == 2
    assert "3 of 128 values of the logits are not finite" in result.stderr
    assert result.stdout == ""


def test_without_scipy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else found(name))
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("a model was loaded"))
    result = invoke("verify")
    assert result.exit_code == 2
    assert 'verify needs scipy: pip install "inertia_fx[verify]"' in result.stderr
