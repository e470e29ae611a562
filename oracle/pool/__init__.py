"""transformers itself, in several orders of evaluation: the noise floor."""
