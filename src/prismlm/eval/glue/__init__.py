"""GLUE: a decoder fine-tuned on nine tasks of sentences and pairs of sentences."""
