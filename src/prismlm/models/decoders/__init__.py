"""This package's own decoders, and how Hugging Face's library knows them."""
