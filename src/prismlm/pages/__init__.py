"""HTML pages and plots: they show what other packages computed, and compute nothing."""
