"""Patches of modules: each wraps what it found, and all come off in reverse order."""

import torch
from torch import nn

from zinfer.model.module_patches import ModulePatches, is_patched


def test_patches_wrap_each_other_and_come_off() -> None:
    module, patches = nn.Identity(), ModulePatches()
    for number in (2.0, 3.0):
        patches.patch(module, lambda x, found=module.forward, number=number: number * found(x) + 1)  # type: ignore[misc]
    patches.patch(module, lambda: "mine", "name")
    assert module(torch.ones(())) == 3 * (2 + 1) + 1
    assert module.name() == "mine"  # type: ignore[operator]
    patches.undo()
    assert not is_patched(module)
    assert not is_patched(module, "name")
    assert module(torch.ones(())) == 1


def test_what_was_there_before_and_what_came_after_stay() -> None:
    first, second, patches = nn.Identity(), nn.Identity(), ModulePatches()
    first.forward = own = lambda x: x + 5  # type: ignore[method-assign, assignment]
    for module in (first, second):
        patches.patch(module, lambda x, found=module.forward: 2 * found(x))  # type: ignore[misc]
    second.forward = later = lambda x: x + 7  # type: ignore[method-assign, assignment]
    patches.undo()
    patches.undo()
    assert first.__dict__["forward"] is own
    assert second.__dict__["forward"] is later
