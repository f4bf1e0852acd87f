"""Render chat templates in a separate process; `ChatTemplates` runs this file as a script.

A template may loop forever or fill the memory in a call that Python cannot interrupt. Here the kernel ends the process
at a limit of CPU seconds, and exceeding the memory limit raises MemoryError. Requests and answers are JSON, one per
line. It imports neither zinfer nor torch, so it starts in a second.
"""

import json
import math
import os
import resource
import sys
from typing import Any, Final

_MOST_BYTES: Final = 1 << 30
"""Memory limit, on top of the process's memory before it renders."""
_MOST_CHARACTERS: Final = 1 << 26
"""Limit of a rendered chat, more than any model's context."""


def main() -> None:
    """Answer requests until stdin ends; the only argument is the limit of CPU seconds per request."""
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
            raise TemplateError(f"they render to {len(rendered[0])} characters, more than {_MOST_CHARACTERS}")
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
    """Set the CPU limit for the next chat; SIGXCPU ends the process beyond it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + most_cpu_s)


def _limit(what: int, most: int) -> None:
    _, bound = resource.getrlimit(what)
    resource.setrlimit(what, (most if bound == resource.RLIM_INFINITY else min(most, bound), bound))


if __name__ == "__main__":
    main()
