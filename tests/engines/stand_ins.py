"""Small language models in place of those that vLLM runs on GPUs alone."""

from vllm.model_executor.models.llama import LlamaForCausalLM


class Llama(LlamaForCausalLM):
    """A language model of Llama, with what the class of Kimi-K3 calls."""

    def process_weights_after_loading(self) -> None:
        """Do nothing."""
