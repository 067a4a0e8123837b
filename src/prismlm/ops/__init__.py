"""Pure tensor functions: no modules, no configuration, no state."""
