"""A model class for mini-swe-agent: OpenAI's API with `requests`. Importing litellm takes most of the program's start.

The program is not changed, but it must find this file: README.md shows how.
"""

import os
from typing import Any

from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel


class QuickModel(OpenRouterTextbasedModel):  # type: ignore[misc]
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
