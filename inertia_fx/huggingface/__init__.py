"""All that knows transformers: the compiled model, its cache, what is refused."""
