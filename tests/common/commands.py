"""Invoke the command line, on a model with a tokenizer of the demo's words."""

from __future__ import annotations

import re
from typing import Any

import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from typer.testing import CliRunner, Result

from inertia_fx.cli import commands, demo
from tests.common.models import VOCABULARY

TEMPLATE = "{% for message in messages %}user {{ message['content'] }}{% endfor %} assistant "


def tokenizer(template: str | None = None) -> Any:
    """One token per word of the demo's text, and words to spare for whatever a random model says."""
    text = " ".join([demo.INTRODUCTION, demo.FILLER, demo.NEEDLE, demo.QUESTION, demo.ANSWER_PREFIX, "user assistant"])
    words = list(dict.fromkeys(["[UNK]", *re.findall(r"\w+|[^\w\s]+", text)]))
    words += [f"w{index}" for index in range(len(words), VOCABULARY)]
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    result = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    result.chat_template = template
    return result


def invoke(*arguments: str) -> Result:
    assert commands.app is not None
    return CliRunner().invoke(commands.app, list(arguments), env={"COLUMNS": "80"})
