"""The tower of MiniMax: ``minimax_m3``; its pixels are ``encoders.inputs.patches``."""
