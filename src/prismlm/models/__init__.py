"""The Hugging Face boundary: where the head reads, the files beside a checkpoint, own decoders.

Importing this package makes Hugging Face's Auto classes know prismlm's model types.
"""

from prismlm.models.decoders import registration as registration
