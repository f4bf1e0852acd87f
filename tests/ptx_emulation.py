"""Runs inline PTX under Triton's interpreter: the few instructions that `zinfer.kernels.fragment_ptx` writes.

Threads run in lockstep, so results would not show a race. Shared memory therefore tracks which copies each thread knows
to be complete, and fails when a thread reads or overwrites others. Memory that was not copied to is NaN. Global memory
can be read only inside the registered tensors.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from zinfer.kernels.fragment_linear import FragmentCut

Array = np.ndarray[Any, Any]

BASE: Final = 4096  # of shared memory: not 0
POISON: Final = 0xFFFFFFFF  # two NaN in float16 as in bfloat16
WARP: Final = 32


class SharedMemory:
    """A program's. Groups of neighbouring threads meet at barriers; each counts those that it has passed."""

    def __init__(self, nbytes: int, num_threads: int) -> None:
        words = nbytes // 4
        self.data = np.full(words, POISON, np.uint32)
        self.clock = np.zeros(num_threads, int)
        self.writer = np.full(words, -1)
        self.is_there = np.ones(words, bool)
        self.since = np.full(words, -1)  # the writer's clock when it waited for its copy
        self.readers = np.zeros((words, num_threads), bool)  # that may not have finished
        self.coming: list[tuple[Array, Array]] = []
        self.num_barriers = 0

    def copy(self, address: Array, values: Array, threads: Array) -> None:
        """Four words for each of some threads, on their way."""
        at = self._claimed(address, threads)
        self.is_there[at] = False
        self.coming.append((at, values))

    def wait(self) -> None:
        for at, values in self.coming:
            self._put(at, values)
        self.coming = []

    def write(self, address: Array, values: Array) -> None:
        """Four words of every thread, at once."""
        self._put(self._claimed(address, np.arange(len(address))), values)

    def meet(self, threads: Array) -> None:
        self.num_barriers += 1
        self.clock[threads] += 1
        self.readers[:, threads] = False

    def read(self, address: Array) -> Array:
        at, thread = self._places(address), np.arange(len(address))[:, None]
        writer = self.writer[at]
        has_met = (self.clock[thread] > self.since[at]) & (self.clock[thread] == self.clock[writer])
        assert ((writer < 0) | (self.is_there[at] & ((writer == thread) | has_met))).all(), "read before it is known"
        self.readers[at, thread] = True
        return self.data[at]

    def _claimed(self, address: Array, threads: Array) -> Array:
        at = self._places(address)
        assert len(np.unique(at)) == at.size, "two threads write to one place"
        assert self.is_there[at].all(), "written to while a copy is on its way"
        readers = self.readers[at].any((0, 1))
        assert not readers.any(), f"overwritten while threads {np.nonzero(readers)[0]} may read"
        self.writer[at] = threads[:, None]
        return at

    def _put(self, at: Array, values: Array) -> None:
        self.data[at], self.is_there[at] = values, True
        self.since[at] = self.clock[self.writer[at]]

    def _places(self, address: Array) -> Array:
        offset = address.astype(np.int64) - BASE
        assert ((offset >= 0) & (offset + 16 <= 4 * len(self.data)) & (offset % 16 == 0)).all()
        return offset[:, None] // 4 + np.arange(4)


class Machine:
    """What one `inline_asm_elementwise` after the other finds; programs run one by one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.bounds = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        self.shared: SharedMemory | None = None
        self.num_barriers = 0

    def run(self, text: str, constraints: str, operands: Sequence[Array]) -> list[Array]:
        """The values of the outputs: 32 bits each, float where they are marked so."""
        kinds = constraints.split(",")
        num_outputs = sum(kind[0] == "=" for kind in kinds)
        assert len(operands) == len(kinds) - num_outputs
        self.count = len(operands[0])
        self.registers: dict[str, Array] = {}
        self.predicates: dict[str, Array] = {}
        for number, (kind, value) in enumerate(zip(kinds[num_outputs:], operands, strict=True), num_outputs):
            wanted = {"r": np.int32, "f": np.float32, "l": np.uint64}[kinds[int(kind)][1:] if kind.isdigit() else kind]
            assert (value.dtype, value.shape) == (wanted, (self.count,)), kind
            name = f"${kind if kind.isdigit() else number}"
            self.registers[name] = value.copy() if kind == "l" else value.view(np.uint32).copy()
        for line in filter(None, map(str.strip, re.sub(r"\{ | \}", "", text).split(";"))):
            self._instruction(line)
        outputs = [(kinds[number], self.registers[f"${number}"]) for number in range(num_outputs)]
        return [value.view({"=r": np.int32, "=f": np.float32}[kind]) for kind, value in outputs]

    def _instruction(self, line: str) -> None:
        mask = np.ones(self.count, bool)
        if line[0] == "@":
            name, line = line[1:].split(None, 1)
            mask = self.predicates[name]
        operation, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if operation == ".shared":
            self.shared = SharedMemory(int(re.findall(r"\[(\d+)\]", rest)[0]), self.count)
        elif operation.startswith("setp"):
            is_equal = self._value(operands[1]) == self._value(operands[2])
            self.predicates[operands[0]] = is_equal if operation == "setp.eq.u32" else ~is_equal
        elif operation == "mov.b32" and operands[0][0] == "{":
            value = self._value(operands[1])
            for name, half in zip(_names(operands[0]), (value & 0xFFFF, value >> 16), strict=True):
                self.registers[name] = half
        elif operation.startswith(("ld.", "st.", "cp.", "bar.")):
            self._memory(operation, operands, mask)
        elif operation.startswith("mma."):
            left, right, sums = (list(map(self._value, _names(each))) for each in operands[1:])
            for name, value in zip(_names(operands[0]), _mma(operation, left, right, sums), strict=True):
                self.registers[name] = value
        elif operation != ".reg":
            self.registers[operands[0]] = _arithmetic(operation, [self._value(each) for each in operands[1:]])

    def _memory(self, operation: str, operands: list[str], mask: Array) -> None:
        if operation.startswith("ld.global"):
            names = _names(operands[0])
            values = np.full((self.count, len(names)), POISON, np.uint32)
            if mask.any():
                values[mask] = self._global(self.registers[operands[1].strip("[]")][mask], len(names))
            self.registers |= {name: values[:, number] for number, name in enumerate(names)}
            return
        assert self.shared is not None or operation == "bar.warp.sync"
        if operation == "cp.async.cg.shared.global":
            assert operands[2] == "16"
            address, pointer = (self.registers[each.strip("[]")][mask] for each in operands[:2])
            if mask.any():
                self.shared.copy(address, self._global(pointer, 4), np.nonzero(mask)[0])
        elif operation == "cp.async.wait_all":
            self.shared.wait()
        elif operation == "bar.sync":
            assert operands[0] != "0", "Triton's own"
            assert mask.sum() == int(operands[1])
            assert (mask.reshape(-1, WARP).any(1) == mask.reshape(-1, WARP).all(1)).all(), "part of a warp at a barrier"
            self.shared.meet(np.nonzero(mask)[0])
            self.num_barriers += 1
        elif operation == "st.shared.v4.b32":
            values = np.stack([self._value(name) for name in _names(operands[1])], -1)
            self.shared.write(self.registers[operands[0].strip("[]")], values)
        elif operation == "ld.shared.v4.b32":
            values = self.shared.read(self.registers[operands[1].strip("[]")])
            self.registers |= {name: values[:, number] for number, name in enumerate(_names(operands[0]))}
        else:
            assert operation == "bar.warp.sync", operation

    def _global(self, pointer: Array, num_words: int) -> Array:
        ends = pointer + np.uint64(4 * num_words)
        assert (pointer % (4 * num_words) == 0).all(), "not aligned"
        assert np.any([(pointer >= first) & (ends <= last) for first, last in self.bounds], axis=0).all(), "outside"
        mask, other = np.ones(len(pointer), bool), np.zeros(len(pointer), np.int32)
        load = interpreter._interpreter.load
        words = [load(pointer + np.uint64(4 * i), mask, other, np.dtype(np.int32)) for i in range(num_words)]
        return np.stack(words, -1).view(np.uint32)

    def _value(self, name: str) -> Array:
        if name in self.registers:
            return self.registers[name]
        return np.full(self.count, BASE if name == "staged_x" else int(name, 0), np.uint32)


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


def _arithmetic(operation: str, values: list[Array]) -> Array:
    first, *others = values
    match operation:
        case "mov.u32" | "mov.b32":
            return first.copy()
        case "shr.u32" | "shr.b32":
            return first >> others[0]
        case "xor.b32":
            return first ^ others[0]
        case "prmt.b32":
            return _picked(first, *others)
        case "shl.b32":
            return first << others[0]
        case "and.b32":
            return first & others[0]
        case "lop3.b32":
            assert (others[2] == 0xEA).all(), "(a and b) or c"
            return (first & others[0]) | others[1]
        case "cvt.f32.f16":
            return first.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        case "fma.rn.f32":
            left, right, sums = (value.view(np.float32).astype(np.float64) for value in values)
            return (left * right + sums).astype(np.float32).view(np.uint32)
        case "add.rn.f16x2":
            return _packed(halves(first, False) + halves(others[0], False), False)
        case "fma.rn.f16x2" | "fma.rn.bf16x2":
            left, right, sums = (halves(value, "bf" in operation) for value in values)
            return _packed(left * right + sums, "bf" in operation)
    raise NotImplementedError(operation)


def _picked(low: Array, high: Array, chosen: Array) -> Array:
    """Four bytes of two words, by the numbers in a third one's lower four nibbles."""
    eight = high.astype(np.uint64) << np.uint64(32) | low
    found = np.zeros_like(low)
    for place in range(4):
        number = chosen >> 4 * place & 15
        assert (number < 8).all(), "no sign is repeated"
        byte = eight >> (8 * number).astype(np.uint64) & np.uint64(255)
        found |= byte.astype(np.uint32) << 8 * place
    return found


def halves(words: Array, is_bfloat: bool) -> Array:
    """Two numbers of each word, the low half's first, in float64."""
    numbers = np.stack((words & 0xFFFF, words >> 16), -1)
    if is_bfloat:
        return (numbers << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    return numbers.astype(np.uint16).view(np.float16).astype(np.float64)


def _packed(numbers: Array, is_bfloat: bool) -> Array:
    """The inverse; the numbers must be exact, as codes are."""
    if is_bfloat:
        bits = numbers.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        words = bits >> 16
    else:
        words = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    assert np.array_equal(halves(words[:, 0] | words[:, 1] << 16, is_bfloat), numbers)
    return words[:, 0] | words[:, 1] << 16


def _mma(operation: str, left: list[Array], right: list[Array], sums: list[Array]) -> list[Array]:
    """m16n8k16; PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"."""
    is_bfloat = ".bf16.bf16.f32" in operation
    assert is_bfloat or operation.endswith(".row.col.f32.f16.f16.f32")
    lane, warp = np.arange(len(left[0])) % WARP, np.arange(len(left[0])) // WARP
    row, pair = lane // 4, lane % 4 * 2
    a, b = np.zeros((warp[-1] + 1, 16, 16)), np.zeros((warp[-1] + 1, 16, 8))
    c = np.zeros((warp[-1] + 1, 16, 8))
    for i in range(8):
        a[warp, row + i // 2 % 2 * 8, pair + i % 2 + i // 4 * 8] = halves(left[i // 2], is_bfloat)[:, i % 2]
    for i in range(4):
        b[warp, pair + i % 2 + i // 2 * 8, row] = halves(right[i // 2], is_bfloat)[:, i % 2]
        c[warp, row + i // 2 * 8, pair + i % 2] = sums[i].view(np.float32)
    with np.errstate(invalid="ignore"):  # tokens that are not there
        d = (a @ b + c).astype(np.float32)
    return [d[warp, row + i // 2 * 8, pair + i % 2].view(np.uint32) for i in range(4)]


@contextmanager
def emulated(*tensors: torch.Tensor) -> Iterator[Machine]:
    """Inline PTX of kernels that are launched meanwhile runs, and reads these tensors only."""
    machine = Machine(tensors)

    class Result:
        def __init__(self, values: list[Array]) -> None:
            self.values = values

        def get_result(self, number: int) -> Any:
            value = self.values[number]
            return interpreter.TensorHandle(value, tl.float32 if value.dtype == np.float32 else tl.int32)

    def create(_: object, text: str, constraints: str, operands: Any, types: object, pure: bool, pack: int) -> Result:
        assert pack == 1
        return Result(machine.run(text, constraints, [operand.data for operand in operands]))

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_inline_asm", create, create=True),
        mock.patch.object(interpreter, "_patch_lang_tensor", patched),
        mock.patch.object(tl.core.tuple, "__radd__", lambda self, other: tl.core.tuple([*other, *self]), create=True),
    ):
        yield machine


@contextmanager
def cut_into(programs: int | None) -> Iterator[None]:
    """Within it the turns of all tiles are divided among so many programs; None: as ever."""
    of = FragmentCut.of
    with mock.patch.object(
        FragmentCut, "of", lambda *facts: replace(of(*facts), **{} if programs is None else {"programs": programs})
    ):
        yield
