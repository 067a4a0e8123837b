"""prismlm inspect: one file for each thing that can be inspected."""
