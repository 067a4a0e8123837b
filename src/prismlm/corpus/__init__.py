"""Text to tokens: documents keep their id, source, licence and offsets."""
