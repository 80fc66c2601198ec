"""The warm start: a compiled decode step, guards included, kept on disk for the next process."""
