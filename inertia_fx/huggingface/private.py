"""List every private attribute of transformers that `inertia_fx` uses. A test holds the list against the sources.

All of them are in the sources of 5.17.0, 5.20.0 and 5.24.0; CI runs the tests with the oldest and the newest of these.
"""

from __future__ import annotations

from typing import NamedTuple


class Private(NamedTuple):
    """One private attribute.

    Attributes:
        name: of the attribute or method.
        owner: the class that has it.
        where: files, from this folder, that use it.
        what: it is used for.
        why: there is no public one.
    """

    name: str
    owner: str
    where: tuple[str, ...]
    what: str
    why: str


PRIVATE = (
    Private(
        "_prepare_cache_for_generation",
        "GenerationMixin",
        ("model.py",),
        "overridden: hands `generate` an InertiaCache, refuses assisted decoding and other cache_implementations",
        "`generate` asks nobody else which cache to make; cache_implementation= takes names of its own only, and"
        " `custom_generate` would replace the whole loop",
    ),
    Private(
        "_prefill",
        "GenerationMixin",
        ("model.py",),
        "overridden: every forward inside it is prompt, also one of a single token (SPEC D16)",
        "a forward cannot tell a last chunk of one token from a decode step; prefill_chunk_size is not passed on to it",
    ),
    Private(
        "_is_user_defined",
        "Cache",
        ("model.py",),
        "set on a cache that the user passed, as the overridden method would: it is returned, so that the last tokens"
        " are counted before `generate` stops",
        "it is a mark between two methods of `generate`, without a setter",
    ),
    Private(
        "_supports_default_dynamic_cache",
        "GenerationMixin",
        ("checks.py",),
        "asked before anything else of a cache: models that keep another kind of state are refused",
        "the class attributes that say what a model can do are private as well, and none says this",
    ),
    Private(
        "_attn_implementation",
        "PreTrainedConfig",
        ("checks.py", "model.py", "../cli/commands.py"),
        'read: "sdpa" takes a boolean mask and "eager" one that is added; others hide their probabilities',
        "it can be set in public (`set_attn_implementation`), but only be read here",
    ),
)
