"""Scripts behind docs/results/: see README.md."""
