"""config.json -> LlamaConfig: every key is used, ignored with a reason, or refused."""
