"""Two small models that scripts train and read."""

from benchmarks.signal_noise_attention import measure as signal_noise_training

SMALL = {"preset": "signal-noise-laptop", "hidden_size": 32, "head_size": 8, "num_hidden_layers": 1}
TWO = {
    "ratio π": signal_noise_training.Variant(SMALL),
    "GPT-2": signal_noise_training.Variant(
        {"preset": "gpt2-laptop", "n_embd": 30, "n_layer": 1, "n_positions": 128}, None
    ),
}
