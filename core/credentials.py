"""The API key that the commands which talk to a server send; from the environment, where other users do not see it."""

import os
from collections.abc import Mapping

KEY_VARIABLES = ("BATON_API_KEY", "OPENAI_API_KEY")  # the first that is set


def api_key_headers(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The header of the user's key; none when there is no key."""
    environ = os.environ if environ is None else environ
    key = next((key for name in KEY_VARIABLES if (key := environ.get(name, "").strip())), "")
    return {"Authorization": f"Bearer {key}"} if key else {}
