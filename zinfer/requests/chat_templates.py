"""Render chat templates within limits of time and memory."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from zinfer.errors import ConfigError
from zinfer.requests.limited_worker import LimitedWorker

_MOST_CPU_S: Final = 10


class ChatTemplates:
    """Renders chats in a subprocess (`LimitedWorker`).

    Args:
        most_cpu_s: limit of CPU seconds per chat; long ones take milliseconds.
    """

    def __init__(self, most_cpu_s: int = _MOST_CPU_S) -> None:
        self._worker = LimitedWorker("chats", "renders chat templates", most_cpu_s)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a chat, with the beginning of the next message, or up to the end of its last message's text.

        Raises:
            ConfigError: the template refuses the messages, fails, or takes too long; or they are not JSON.
            JobError: the process does not start.
        """
        # Drop null values like transformers' apply_chat_template: templates handle missing keys, but not null.
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        turn = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            line = json.dumps({"template": template, "messages": given, "variables": dict(variables), "turn": turn})
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"messages: a chat template takes only JSON values: {error}") from error
        answer = self._worker.ask(line)
        for outcome, what in (("refused", "refuses them"), ("failed", "fails on them")):
            if outcome in answer:
                raise ConfigError(f"messages: the chat template {what}: {answer[outcome]}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process for good, even while it renders a chat for another thread."""
        self._worker.close()
