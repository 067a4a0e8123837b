"""A GGUF file of a small Llama, as converters write it: names of llama.cpp, rotary halves apart."""

import json
from pathlib import Path

import numpy as np

ORDINARY, CONTROL = 1, 3


def write_gguf(model, tokenizer_file: Path, out: Path, template: str | None = None) -> Path:
    """Write a Llama and its byte-level BPE tokenizer as float32 GGUF."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    config, writer = model.config, GGUFWriter(str(out), "llama")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    written = json.loads(tokenizer_file.read_text())
    tokens = sorted(written["model"]["vocab"], key=written["model"]["vocab"].get)
    special = {token["content"] for token in written["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in written["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else ORDINARY for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_bos_token_id(config.eos_token_id)
    if template is not None:
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        if found := names.get_name(name, try_suffixes=(".weight",)):
            writer.add_tensor(found, _turned(name, tensor.float().numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _turned(name: str, weight: np.ndarray, config) -> np.ndarray:
    """Return queries and keys with the pairs that turn together side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return weight
    split = weight.reshape(count, 2, len(weight) // count // 2, -1)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))
