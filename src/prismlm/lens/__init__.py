"""Reading a trained model: index, attribution, traces, quality. No HTTP, no printing."""
