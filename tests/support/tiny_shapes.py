"""Shapes of benchmarks, small enough for a CPU."""

from stoop.bench.shape_configs import LLAMA, QWEN3_5

TINY = LLAMA | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
TINY_QWEN = QWEN3_5 | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
