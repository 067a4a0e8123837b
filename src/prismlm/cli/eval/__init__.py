"""prismlm eval: what a model is worth, by benchmarks and by studies."""
