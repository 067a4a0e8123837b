"""The Hugging Face boundary: where the head reads, and the files beside a checkpoint."""
