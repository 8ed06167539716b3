"""What every request of ours carries: the Hub client's token, and who asks.

Not the client's ``build_hf_headers``: to name the program that runs it, that one may ask the Hub
for a list first, which is a request more than a load is to send.
"""

from __future__ import annotations

import platform

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import LocalTokenNotFoundError

AGENT = f"vitgraph; hf_hub/{huggingface_hub.__version__}; python/{platform.python_version()}"


def request_headers(token: bool | str | None) -> dict[str, str]:
    """User agent and, where there is a token to send, authorization.

    Args:
        token: as the client takes it: the token itself, True for the one logged in with (required),
            False for none, None for that one if there is one.

    Raises:
        LocalTokenNotFoundError: True, and nobody is logged in.
    """
    headers = {"user-agent": AGENT, "accept-encoding": "identity"}
    if token is None and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        token = huggingface_hub.get_token()
    if token is True:
        token = huggingface_hub.get_token()
        if token is None:
            raise LocalTokenNotFoundError(
                "token=True, but nobody is logged in: run hf auth login, or pass the token"
            )
    return headers | {"authorization": f"Bearer {token}"} if token else headers
