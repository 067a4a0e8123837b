"""The demo: a real model with its prototypes, or a small one trained on the spot."""
