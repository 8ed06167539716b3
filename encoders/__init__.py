from .qwen3_vl import Qwen3VLConfig, Qwen3VLEncoder
