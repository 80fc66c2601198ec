"""Trust, but verify: the literal reference that the compiled graph must agree with."""
