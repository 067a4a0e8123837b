"""The Hugging Face boundary: output embeddings, files beside a checkpoint, own decoders.

Importing this package registers prismlm's model types with Hugging Face's Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from prismlm.models.decoders.own_decoder import DeltaNetConfig, DeltaNetForCausalLM, DeltaNetModel
from prismlm.models.decoders.protot import ProtoTConfig, ProtoTForCausalLM, ProtoTModel
from prismlm.models.decoders.signal_noise import (
    SignalNoiseConfig,
    SignalNoiseForCausalLM,
    SignalNoiseModel,
)

for _config, _model, _language_model in (
    (DeltaNetConfig, DeltaNetModel, DeltaNetForCausalLM),
    (ProtoTConfig, ProtoTModel, ProtoTForCausalLM),
    (SignalNoiseConfig, SignalNoiseModel, SignalNoiseForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _language_model, exist_ok=True)
