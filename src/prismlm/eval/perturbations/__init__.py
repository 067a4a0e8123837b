"""Sentences and their perturbed forms: what a meaning survives, and what flips it."""
