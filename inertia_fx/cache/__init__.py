"""The slot cache: which tokens of a batch of sequences are kept, and where. Plain torch: nothing here knows transformers.

ledger      counts, on the host: tokens and slots per row, phases, when to evict and to grow
storage     tensors: slot buffers per layer and the retention state
eviction    which tokens a first eviction keeps
slot_cache  SlotCache, which joins them and is what users drive
"""

from .ledger import Phase
from .slot_cache import SlotCache
from .storage import Entry, RetentionState, SlotLayer

__all__ = ["Entry", "Phase", "RetentionState", "SlotCache", "SlotLayer"]
