"""The slot cache: which tokens of a batch of sequences are kept, and where. Plain torch: nothing here knows transformers."""

from .slot_cache import SlotCache
from .storage import Entry, RetentionState, SlotLayer

__all__ = ["Entry", "RetentionState", "SlotCache", "SlotLayer"]
