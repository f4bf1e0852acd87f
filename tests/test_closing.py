"""Closing while something else goes on: another thread's call, Ctrl-C, a process that was forked."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import random_prompts
from engine_support import PROMPT, folder, greedy
from engines import config_for
from llm_support import by_ids
from threads import interrupted, open_descriptors, rings_the_alarm, settled_threads

import zinfer
from zinfer import LLM, SamplingParams

__all__ = ["folder"]  # fixtures


def llm_over(folder: Path) -> LLM:
    return LLM(folder, config_for(folder, "disk", 2, "cpu"), kv_cache_memory="2MB")


def told_by_a_child(work: Callable[[], object]) -> str:
    """What ``work`` raises in a forked child, which is killed after ten seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    killer = threading.Timer(10, os.kill, (child, 9))
    killer.start()
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    killer.cancel()
    assert status == 0, "the child hung"
    return told


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_so(folder: Path) -> None:
    engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
    llm = llm_over(folder)
    expected = greedy(engine).tolist()
    for work in (lambda: greedy(engine), lambda: engine(PROMPT), lambda: llm.generate(by_ids([[5, 6]]))):
        told = told_by_a_child(work)
        assert told.startswith("RuntimeError: process ")
        assert f"was forked from process {os.getpid()}, which made this engine" in told
        assert 'make the engine in the child, or start the child with "spawn"' in told
    for work in (engine.destroy, llm.close):
        assert told_by_a_child(work) == ""
    assert greedy(engine).tolist() == expected
    llm.close()
    engine.destroy()


@pytest.mark.parametrize("turn", range(2))
def test_close_from_another_thread_while_generating(folder: Path, turn: int) -> None:
    """The call ends with a sentence, never with what it stumbles over."""
    llm = llm_over(folder)
    raised: list[BaseException] = []
    begun = threading.Event()

    def work() -> None:
        params = [SamplingParams(max_new_tokens=most) for most in [1, *[100] * 8]]
        try:
            for _ in llm.stream(by_ids(random_prompts(9)), params):
                begun.set()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(20)
    llm.close()
    thread.join(20)
    assert [str(error) for error in raised] == ["this LLM was closed; make a new one"]


def test_closing_within_a_forward_hook_is_refused(folder: Path) -> None:
    engine = zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
    expected = greedy(engine).tolist()
    hook = engine.layers[1].register_forward_hook(lambda *_: engine.destroy())
    with pytest.raises(RuntimeError, match=r"destroy was called within a call .* let the call return first"):
        engine(PROMPT)
    hook.remove()
    assert greedy(engine).tolist() == expected
    engine.destroy()
    llm = llm_over(folder)
    hook = llm._model.layers[1].register_forward_hook(lambda *_: llm.close())
    with pytest.raises(RuntimeError, match=r"close was called within a pass .* let the pass return first"):
        llm.generate(by_ids([[5, 6]]))
    hook.remove()
    assert len(llm.generate(by_ids([[5, 6]]), SamplingParams(max_new_tokens=2))[0].token_ids) == 2
    llm.close()


@pytest.mark.sampled(2)
@rings_the_alarm
@pytest.mark.parametrize("kind", ["engine", "llm"])
def test_ctrl_c_while_closing_leaves_nothing_open(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    threads, descriptors = settled_threads(), open_descriptors()
    real = os.close

    def slow(fd: int) -> None:
        time.sleep(0.005)
        real(fd)

    hits = 0
    for index in range(6):
        made = (
            llm_over(folder) if kind == "llm" else zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu"))
        )
        if isinstance(made, LLM):
            made.generate(by_ids([[5, 6]]), SamplingParams(max_new_tokens=2))
        else:
            made(PROMPT)
        close = made.close if isinstance(made, LLM) else made.destroy
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", slow)
            hits += interrupted(close, after_s=0.0005 + 0.002 * index)
        close()
        assert settled_threads() == threads, threading.enumerate()
        assert open_descriptors() == descriptors
    assert hits >= 2
