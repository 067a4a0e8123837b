"""Decoders of this package, as Hugging Face models."""
