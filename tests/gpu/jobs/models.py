"""Models of the jobs. `tiny` runs anywhere; large ones start from zeros: 13 billion random numbers take minutes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config,
    "gpt2-4": lambda: GPT2Config(n_layer=4),
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "opt-13b": lambda: OPTConfig(
        hidden_size=5120, ffn_dim=20480, num_hidden_layers=40, num_attention_heads=40, word_embed_proj_dim=5120
    ),
    "tiny": lambda: GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=200, n_positions=128),
}
EMPTY = ("opt-13b", "llama-1b")


def config_of(name: str) -> Any:
    config = CONFIGS[name]()
    config.use_cache = False
    return config


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config, default = config_of(name), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if name not in EMPTY:
            return AutoModelForCausalLM.from_config(config)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    model = empty.to_empty(device="cpu")
    model.tie_weights()  # to_empty gives the head a copy; in the real model it is the embedding
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def batch(model: Any, size: int, length: int, device: str) -> Any:
    return torch.randint(10, model.config.vocab_size, (size, length), device=device)
