"""The Triton kernels: attention with scores, the state's bookkeeping, and how both are cut to a device."""
