"""Small random decoders of our own, of each family and under each switch."""

import torch

from prismlm.models.presets import build_config, build_model

VOCABULARY = 50
END = 0
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
RECURRENT = {
    "deltanet": {"model_type": "prismlm_deltanet", "num_heads": 3, "num_hidden_layers": 2},
    "protot": {"model_type": "prismlm_protot", "num_channels": 6, "num_hidden_layers": 3},
    "protot-off": {
        "model_type": "prismlm_protot",
        "num_channels": 3,
        "num_hidden_layers": 2,
        "shared_gate_layers": [],
        "convolution_layers": [],
        "mass_normalisation": False,
        "temperature_mode": "multiply",
        "tie_word_embeddings": False,
    },
    "protot-groups": {
        "model_type": "prismlm_protot",
        "num_channels": 6,
        "num_hidden_layers": 2,
        "num_groups": 2,
        "decay_half_lives": [1.0, 64.0],
        "decay_mode": "token",
        "initial_temperatures": [2.0, 0.5],
    },
}


SIGNAL_NOISE = {
    "source": {},
    "untied": {"tied_output": False, "bias": True, "frequency_scaling": "angle"},
    "R = 4": {"expansion": 4, "frequency_ratio": 2.0, "tie_word_embeddings": False},
}
FAMILIES = RECURRENT | {
    name: {"model_type": "prismlm_signal_noise", "head_size": 6, "num_hidden_layers": 2} | settings
    for name, settings in SIGNAL_NOISE.items()
}


def own_model(family, **changes):
    torch.manual_seed(0)
    settings = FAMILIES[family] | {"hidden_size": 24, "initializer_range": 0.3} | changes
    if "head_size" in settings:
        settings.setdefault("noise_weight", 0.1)
    model = build_model(build_config(settings, VOCABULARY, END)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("decay_map"):
            torch.nn.init.normal_(parameter)  # as after training
    return model


def tokens(*shape, seed=0):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, **inputs):
    """Return the gradient of each parameter, with the same dropout at every call."""
    model.zero_grad()
    torch.manual_seed(4)
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
