"""Make needle prompts that tell good eviction from bad: a number hidden in a long text, asked for at the end.

Two forms. `prefixed`: the answer's first words are given, so that the first new token is the number. `chat`: the model
starts its answer itself, and the number comes some ten tokens later; whoever has evicted by then has lost it.

SmolLM2-135M-Instruct answers all of them with the full cache: at 1,180 tokens (45 fillers), 2,810 (113) and, `chat`,
820 (31).
"""

from __future__ import annotations

import dataclasses
from typing import Any

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "

_ANSWERS = ["29093", "86172", "29421", "69807", "12560", "87506", "72814", "42306", "27107", "46645", "60860", "37887"]
_PLACES = {
    45: (1, 5, 9, 13, 16, 20, 24, 28, 31, 35, 39, 43),
    113: (4, 14, 23, 32, 42, 51, 61, 70, 80, 89, 98, 108),
}
_CHAT = (
    ("castle", 6, "66226"), ("castle", 12, "17684"), ("mirror", 26, "88079"), ("forest", 23, "83247"),
    ("candle", 12, "23937"), ("forest", 26, "62316"), ("piano", 14, "17319"), ("bridge", 11, "14223"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Needle:
    """`user` goes through the chat template, `prefix` after it; `answer` must occur among `new_tokens` greedy tokens.

    `without` is the user's message without a needle, the same for all prompts of one kind.
    """

    user: str
    prefix: str
    answer: str
    new_tokens: int
    without: str

    def without_needle(self) -> Needle:
        """The same text with fillers alone: equal up to where the needle is."""
        return dataclasses.replace(self, user=self.without, answer="")

    def token_ids(self, tokenizer: Any) -> list[int]:
        messages = [{"role": "user", "content": self.user}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids + (tokenizer(self.prefix, add_special_tokens=False)["input_ids"] if self.prefix else [])


def prefixed(fillers: int) -> list[Needle]:
    """Twelve prompts of 45 or 113 fillers."""
    before = (
        "Some text is given below. A special magic number is hidden in it. Make sure to memorize it. I will ask you about"
        " the number afterwards.\n"
    )
    after = "\nWhat is the special magic number mentioned in the provided text?"
    return [
        Needle(
            f"{before}{FILLER * place}The special magic number is {answer}. Remember it. {FILLER * (fillers - place)}{after}",
            "The special magic number mentioned in the provided text is",
            answer,
            12,
            f"{before}{FILLER * fillers}{after}",
        )
        for place, answer in zip(_PLACES[fillers], _ANSWERS, strict=True)
    ]


def chat() -> list[Needle]:
    """Eight prompts of 31 fillers."""
    before = "Some special magic numbers are hidden in the text below. Remember them.\n"
    return [
        Needle(
            f"{before}{FILLER * place}The special magic number for {key} is {answer}. {FILLER * (31 - place)}"
            f"\nWhat is the special magic number for {key} mentioned in the text?",
            "",
            answer,
            40,
            f"{before}{FILLER * 31}",
        )
        for key, place, answer in _CHAT
    ]
