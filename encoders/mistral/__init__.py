"""The tower of Mistral: ``pixtral``; its pixels are ``encoders.inputs.patches``."""
