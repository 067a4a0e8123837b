"""What the source's Tables 1 and 15 to 20 say, by the names of the runs that are set beside it."""

from __future__ import annotations

NAMES = {"llama": "LLaMA", "mamba": "Mamba 2", "deltanet": "DeltaNet", "protot": "ProtoT"}
# Table 1 of the source: perplexity at 256, 512, 1,024 and 2,048.
SOURCE = {
    "llama": (78.7, 70.4, 65.3, 63.6),
    "mamba": (86.0, 78.0, 70.5, 69.5),
    "deltanet": (90.4, 76.3, 70.6, 68.9),
    "protot": (90.5, 84.8, 80.5, 81.9),
}
WIDER = {
    "protot-wide": "ProtoT, twice as wide",
    "protot-deep": "ProtoT, twice as many layers",
    "protot-channels": "ProtoT, 64 channels",
}
SOURCE_WIDER = {
    "protot-wide": (97.2, 82.0, 73.7, 73.0),
    "protot-deep": (109.6, 79.8, 74.6, 76.7),
    "protot-channels": (94.0, 83.2, 79.1, 80.5),
}
# Tables 15 to 20: what they are about, and of every row its name and the source's perplexity.
ABLATIONS: dict[str, list[tuple[str, str, float | None]]] = {
    "Table 15: what keeps layer 0's channels apart": [
        ("protot", "all of it", 133.3),
        ("table-15-no-shared-gates", "gates not shared", 133.4),
        ("table-15-layer-0-temperature-1", "τ of layer 0 from 1", 133.6),
        ("table-15-no-convolution", "no convolution", 145.7),
        ("table-15-no-mitigation", "nothing of it", 149.9),
        ("table-15-temperature-multiplied", "scores times τ, not over it", None),
    ],
    "Table 16: width of the convolution": [
        ("table-16-kernel-4", "4", 98.3),
        ("protot", "5", 97.1),
        ("table-16-kernel-6", "6", 96.9),
        ("table-16-kernel-7", "7", 97.5),
    ],
    "Table 17: α at the start": [
        ("table-17-alpha-0.0", "0", 99.2),
        ("table-17-alpha-0.5", "0.5", 97.9),
        ("table-17-alpha-0.8", "0.8", 97.0),
        ("protot", "1", 97.1),
        ("table-17-alpha-1.2", "1.2", 98.7),
    ],
    "Table 18: division by the mass, values of half the width": [
        ("protot", "both", 97.1),
        ("table-18-no-mass-normalisation", "not divided", 101.8),
        ("table-18-full-value-width", "values of full width", 97.3),
    ],
    "Table 19: channels": [
        ("table-19-channels-16", "16", 98.5),
        ("protot", "32", 97.1),
        ("table-19-channels-64", "64", 97.3),
    ],
    "Table 20: dropout": [
        ("protot", "ProtoT, 0.1", 97.1),
        ("table-20-protot-no-dropout", "ProtoT, none", 107.6),
        ("llama", "LLaMA, 0.1", 84.8),
        ("table-20-llama-no-attention-dropout", "LLaMA, none in attention", 85.2),
        ("table-20-llama-no-dropout", "LLaMA, none", 92.4),
        ("mamba", "Mamba 2, 0.1", 91.1),
        ("table-20-mamba-no-dropout", "Mamba 2, none", 96.6),
        ("deltanet", "DeltaNet, 0.1", 99.4),
        ("table-20-deltanet-no-dropout", "DeltaNet, none", 103.5),
    ],
    "Options beyond the source": [
        ("protot", "none of them", None),
        ("beyond-half-lives", "half-lives from 1 to 256", None),
        ("beyond-decay-by-token", "decay by token", None),
        ("beyond-groups", "4 groups", None),
    ],
}
