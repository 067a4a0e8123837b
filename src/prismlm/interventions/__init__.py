"""Edits of a prediction as values, the scope in which they hold, and steering."""
