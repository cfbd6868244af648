"""The configuration of DeepSeek-V3, as Transformers writes it."""

DEEPSEEK_V3 = {"model_type": "deepseek_v3", "hidden_act": "silu", "vocab_size": 129280, "num_hidden_layers": 61}
DEEPSEEK_V3 |= {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048}
DEEPSEEK_V3 |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
DEEPSEEK_V3 |= {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
DEEPSEEK_V3 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
