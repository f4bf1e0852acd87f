"""Answer requests within limits of time and memory; `LimitedWorker` runs this file as a script.

A chat template may loop forever or fill the memory in a call that Python cannot interrupt, and so may the compiler of a
grammar. Here the kernel ends the process at a limit of CPU seconds, and exceeding the memory limit raises MemoryError.
Requests and answers are JSON, one per line. It imports neither zinfer nor torch, and starts in less than a second.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Any, Final

_MOST_BYTES: Final = 1 << 30
"""Memory limit, on top of the process's memory before its first request."""
_MOST_CHARACTERS: Final = 1 << 26
"""Limit of a rendered chat, more than any model's context."""


def main() -> None:
    """Answer requests until stdin ends; the arguments are the task and the limit of CPU seconds per request."""
    most_cpu_s = int(sys.argv[2])
    answer_to = _TASKS[sys.argv[1]]()
    _limit(resource.RLIMIT_CORE, 0)
    with open("/proc/self/statm") as file:
        begun_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _limit(resource.RLIMIT_AS, begun_bytes + _MOST_BYTES)
    _give_cpu_time(most_cpu_s)
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = json.dumps(answer_to(json.loads(line)))
        except Exception as error:
            answer = json.dumps({"failed": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__})
        print(answer, flush=True)
        _give_cpu_time(most_cpu_s)


def _chats() -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return a function that renders a chat."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would import it
    from jinja2.exceptions import TemplateError

    _leave_out("transformers", "transformers.utils")
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: dict[str, Any]) -> dict[str, str]:
        try:
            rendered, _ = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=request["template"],
                **request["turn"],
                **request["variables"],
            )
        except TemplateError as error:
            return {"refused": str(error)}
        except ValueError as error:
            if request["turn"]["continue_final_message"]:  # whose end the template does not show
                return {"refused": f"{error} State add_generation_prompt as true to begin a new message instead"}
            raise
        if len(rendered[0]) > _MOST_CHARACTERS:
            return {"refused": f"they render to {len(rendered[0])} characters, more than {_MOST_CHARACTERS}"}
        return {"text": rendered[0]}

    return render


def _grammars() -> Callable[[dict[str, Any]], dict[str, str]]:
    """Return a function that compiles a grammar over single bytes, and returns the compiler's message, if any."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    class Bytes:
        tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))

    def check(request: dict[str, Any]) -> dict[str, str]:
        matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=LLParserLimits(**request["limits"]))
        matcher.compute_bitmask()
        return {"message": matcher.get_error()}

    return check


_TASKS: Final = {"chats": _chats, "grammars": _grammars}


def _leave_out(*packages: str) -> None:
    """Let modules of packages be imported without what the packages themselves import, which takes most of a second."""
    for name in packages:
        spec = find_spec(name)
        assert spec is not None, f"{name} is not installed"
        sys.modules[name] = module_from_spec(spec)


def _give_cpu_time(most_cpu_s: int) -> None:
    """Set the CPU limit for the next request; SIGXCPU ends the process beyond it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + most_cpu_s)


def _limit(what: int, most: int) -> None:
    _, bound = resource.getrlimit(what)
    resource.setrlimit(what, (most if bound == resource.RLIM_INFINITY else min(most, bound), bound))


if __name__ == "__main__":
    main()
