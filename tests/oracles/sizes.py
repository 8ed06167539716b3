"""Small sizes of the towers, by the names of each config, at which tests compare them."""

INTERN_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "llm_width": 48,
}
INTERN_TILE = {"image_size": 112, "force_image_size": 112}
STEP3_VL_NARROW = {"width": 64, "mlp_ratio": 1.75, "heads": 4, "llm_width": 48}
STEP3_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "output_hidden_size": 40,
    "llm_width": 48,
}
QWEN2_NARROW = {"embed_dim": 64, "mlp_ratio": 2, "num_heads": 4, "hidden_size": 48}
QWEN2_5_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_heads": 4,
    "out_hidden_size": 48,
}
QWEN3_NARROW = {
    "hidden_size": 72,
    "intermediate_size": 140,
    "num_heads": 3,
    "out_hidden_size": 48,
}
GLM4V_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_heads": 4,
    "out_hidden_size": 48,
}
GLM5_NARROW = {**GLM4V_NARROW, "projection_intermediate_size": 80, "swiglu_limit": 2.0}
PIXTRAL_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_attention_heads": 4,
    "head_dim": 16,
    "llm_width": 48,
}
QWEN3_SHALLOW = {"depth": 3, "deepstack_visual_indexes": [0, 2]}
QWEN2_5_SHALLOW = {"depth": 3, "fullatt_block_indexes": [1]}
GEMMA4_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 92,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "position_embedding_size": 160,
    "llm_width": 48,
}

PADDLE_NARROW = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4}
