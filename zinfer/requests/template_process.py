"""Renders chat templates in a process of its own; `ChatTemplates` starts this file as a script.

A template may compute for ever or fill the memory, in one call that Python cannot interrupt. Here the system ends the
process at its limit of CPU seconds, and memory beyond a limit is a MemoryError. Requests and answers are JSON, a line
each. It imports nothing of zinfer, and no torch, so that it starts in a second.
"""

import json
import math
import os
import resource
import sys
from typing import Any, Final

_MOST_BYTES: Final = 1 << 30
"""Of memory, beside what the process has before it renders."""
_MOST_CHARACTERS: Final = 1 << 26
"""Of a rendered chat; more tokens than any model reads."""


def main() -> None:
    """Answer requests until stdin ends; the only argument is the CPU seconds that each may take."""
    most_cpu_s = int(sys.argv[1])
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: dict[str, Any]) -> str:
        rendered, _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
        if len(rendered[0]) > _MOST_CHARACTERS:
            raise TemplateError(f"they come to {len(rendered[0])} characters, more than {_MOST_CHARACTERS}")
        return json.dumps({"text": rendered[0]})

    _limit(resource.RLIMIT_CORE, 0)
    with open("/proc/self/statm") as file:
        begun_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _limit(resource.RLIMIT_AS, begun_bytes + _MOST_BYTES)
    _give_cpu_time(most_cpu_s)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = render(json.loads(line))
        except TemplateError as error:
            answer = json.dumps({"refused": str(error)})
        except Exception as error:
            answer = json.dumps({"failed": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__})
        print(answer, flush=True)
        _give_cpu_time(most_cpu_s)


def _give_cpu_time(most_cpu_s: int) -> None:
    """Have SIGXCPU end the process when the next chat has taken its time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + most_cpu_s)


def _limit(what: int, most: int) -> None:
    _, bound = resource.getrlimit(what)
    resource.setrlimit(what, (most if bound == resource.RLIM_INFINITY else min(most, bound), bound))


if __name__ == "__main__":
    main()
