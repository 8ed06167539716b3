"""The towers of GLM: ``glm4v`` and ``glm_ocr``; their pixels are ``encoders.inputs.patches``."""
