"""Chooses next tokens from logits, on the device that holds them."""

from typing import Final

MOST_PART_LOGITS: Final = 2**23
"""Logits of a part of a batch, or one row. Rows that are not plainly greedy take memory for float64 and int64 copies
and a sort's buffers, so a batch is sampled in parts."""
BYTES_A_LOGIT: Final = 100
"""About the most that a part takes for each of its logits."""
