"""What a prediction relies on: its parts, the text behind them, traces, audits, comparisons."""
