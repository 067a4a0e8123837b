"""Reading the inside of a model: channels, heads, uncertainty feedback."""
