"""Define every refusal of `inertia_fx`, one class per reason.

Each message says what was wrong, where, and what to do. All derive from :class:`InertiaError`; those that
report a bad argument also derive from ``ValueError``, so that a plain ``except ValueError`` catches them.
"""

from __future__ import annotations


class InertiaError(Exception):
    """Base class of all errors raised by `inertia_fx`."""


class ConfigError(InertiaError, ValueError):
    """An argument of `compile`, `Config` or the backend's options is out of range, unknown or contradictory."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting of this name does not exist. The message names the nearest one and all that do."""


class MissingPackageError(ConfigError, ImportError):
    """An optional package is not installed. The message says which, what for, and how to install it."""


class UnsupportedModelError(InertiaError):
    """The model as a whole cannot be compiled correctly (no attention, encoder-decoder, unknown cache layers, ...)."""


class UnsupportedAttentionError(UnsupportedModelError):
    """An attention of the decode graph is not understood. Names the layer, the graph node and the reason.

    Attributes:
        layer: index of the cache layer whose attention was looked for, or ``None`` for the graph as a whole.
        node: name of the offending graph node, or ``None`` if no candidate node exists.
        reason: why it was refused.
    """

    def __init__(self, layer: int | None, node: str | None, reason: str, user_line: str | None = None) -> None:
        self.layer, self.node, self.reason, self.user_line = layer, node, reason, user_line
        super().__init__(layer, node, reason, user_line)

    def __str__(self) -> str:
        where = "the decode graph" if self.layer is None else f"the attention of cache layer {self.layer}"
        at = "" if self.node is None else f" at graph node '{self.node}'"
        line = "" if self.user_line is None else f"\n  written at: {self.user_line}"
        return (
            f"inertia_fx does not understand {where}{at}: {self.reason}.{line}\n"
            "  What was looked for: scaled_dot_product_attention, or matmul -> scale -> + mask -> softmax -> matmul,"
            " over the cache's keys and values, with the cache's mask of valid slots and nothing else.\n"
            "  What to do: try model.set_attn_implementation('sdpa') or 'eager' before compiling; if it stays,"
            " use the uncompiled model: nothing was changed."
        )


class PassError(InertiaError):
    """A pass, of ours or of the user's, raised an error or left a graph that cannot be compiled.

    Attributes:
        name: the pass.
        reason: what it did, or what is wrong with the graph.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(name, reason)

    def __str__(self) -> str:
        return (
            f"The pass {self.name!r} did not work: {self.reason}.\n"
            "  What to do: leave it out of the list of passes, or look at the graph before and after it with"
            " inertia_fx.debug.record(). Nothing was compiled."
        )


class PositionBiasError(UnsupportedAttentionError):
    """The attention adds a bias that depends on positions (ALiBi, relative bias); eviction would move the distances."""


class CacheError(InertiaError):
    """A cache is of the wrong kind, belongs to another model or batch, or is used outside a prompt or a step."""


class UndoError(InertiaError):
    """Tokens should be taken back (`crop`, assisted or prompt-lookup decoding); an eviction cannot be undone."""


class OutputError(InertiaError):
    """A decode step was asked for an output that the compiled graph does not produce (`output_attentions=True`)."""


class TrainingError(InertiaError):
    """A decode step was asked for while the model is in training mode."""


class CompileDisabledError(InertiaError):
    """torch.compile is switched off, so the step would run without the passes and simply forget the oldest tokens."""


class RecompileError(InertiaError):
    """The decode step met so many different shapes or settings that no new ones are compiled."""

    def __init__(
        self,
        message: str = "The decode step has been compiled for so many batch sizes or settings that torch.compile stopped:"
        " raise torch._dynamo.config.recompile_limit, or call inertia_fx.compile(model) again and start new caches.",
    ) -> None:
        super().__init__(message)


class InputError(InertiaError, ValueError):
    """What was handed to `inertia_fx.verify` is not usable: unequal shapes, non-finite scores, no step to run."""


class NotCompiledError(InertiaError, TypeError):
    """`inertia_fx.verify` was given something that `inertia_fx.compile` did not return."""
