"""Reads which tensors a checkpoint of `torch.save` holds and where their bytes are, without running what it asks for.

[Note: pickles without their danger]
Since torch 1.6 such a file (`.bin`, `.pt`, `.pth`) is a zip archive: `data.pkl` describes the tensors, and each storage
is a record of its own, not compressed, so that a tensor is a range of the file as in safetensors.

A pickle is a program for a stack machine, and its instructions REDUCE and BUILD call what the file names. The machine
here calls nothing: a global stays a name, REDUCE records the name beside its arguments, and a name or an instruction
that `torch.save` does not write for tensors is refused where it occurs. It does not recurse, keys are texts or integers
(a hash of nested tuples recurses), and the pickle's size is limited, as is that of the archive's directory.

The archive is untrusted too: records must be stored uncompressed and unencrypted, once each, without overlaps. Their
bytes begin where the local header says, since `torch.save` pads it and not the directory's entry.
"""

import hashlib
import io
import os
import pickletools
import shlex
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import torch

from zinfer.errors import CheckpointError
from zinfer.weights.folder import DOWNLOAD_AGAIN, TRUNCATED, check_pointer, fail, listed, opened, shorten
from zinfer.weights.header import DTYPES, MAX_DIMENSION, MAX_NATURAL, Header, TensorEntry

MAX_PICKLE_BYTES: Final = 8 << 20
"""Limit of the pickle, and of the archive's directory: about 60,000 tensors a file."""
MAX_DIMENSIONS: Final = 64
MAX_MARKS: Final = 100
"""Limit of nested MARK instructions, of which torch nests six."""
WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training code saves a model's tensors beside other things."""
_STORAGES: Final = {
    "torch.BoolStorage": torch.bool,
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}
_DTYPES: Final = {str(dtype): dtype for dtype in DTYPES.values()}
_TENSORS: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETERS: Final = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_ORDERED_DICT: Final = "collections.OrderedDict"
_COLLECTIONS: Final = ("torch.Size", "builtins.set", "__builtin__.set")
"""What DeepSpeed saves beside a module's tensors."""
_GLOBALS: Final = frozenset((*_STORAGES, *_DTYPES, *_TENSORS, *_PARAMETERS, _ORDERED_DICT, *_COLLECTIONS))
_NO_CODE: Final = (
    "nothing of it was run, and tensors need none of this: take the model in safetensors, or a file that holds its "
    "tensors alone"
)
_LOCAL_HEADER: Final = struct.Struct("<4s2xHH16x2H")
"""Of a zip's record: signature, flags, method, and the lengths of its name and of its extra field."""
_LOCAL_SIGNATURE: Final = b"PK\x03\x04"
_IS_ENCRYPTED: Final = 0x1
_IS_UTF_8: Final = 0x800


def read_pickled(path: Path) -> Header:
    """Read which tensors a zip of `torch.save` holds, and where; nothing that the file names is called.

    Raises:
        CheckpointError: the file cannot be read, is damaged, older than the zip format, or asks for anything but
            tensors; a tensor is not row-major; names the file, the tensor or global, the byte and the remedy.
    """
    with opened(path) as (file, identity):
        beginning = file.read(8)
        check_pointer(path, beginning)
        if not beginning.startswith(_LOCAL_SIGNATURE):
            _refuse_other_format(path, beginning)
        archive = _Archive.read(path, file)
        data = archive.pickle(file)
    machine = _Machine(path, archive.records[archive.pickle_name].offset)
    inside, tensors = _find_tensors(path, machine.run(data))
    entries = [_entry(archive, inside, name, tensor) for name, tensor in tensors.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    digest = hashlib.sha256(data)
    for record in archive.records.values():
        digest.update(f"{record.name}\0{record.offset}\0{record.nbytes}\0{record.checksum}\n".encode())
    return Header(path, {entry.name: entry for entry in entries}, identity, digest.hexdigest())


def _refuse_other_format(path: Path, beginning: bytes) -> NoReturn:
    if beginning.startswith(b"\x80"):
        fail(path, "pickled in torch's format before 1.6, which cannot be read in place", _save_again(path))
    fail(path, f"not a file of torch.save: it begins with {beginning!r}")


def _save_again(path: Path, value: str = "torch.load(path, weights_only=True)") -> str:
    """Return a command that saves the file again; `value` is the expression for what it will hold."""
    code = f"import sys, torch; path = sys.argv[1]; torch.save({value}, path)"
    return f"save it again, in place: python -c {shlex.quote(code)} {shlex.quote(os.fspath(path))}"


@dataclass(frozen=True)
class _Record:
    """A record of the archive: `nbytes` bytes from `offset` of the file, after a local header from `begin` on."""

    name: str
    begin: int
    offset: int
    nbytes: int
    checksum: int


class _CappedFile(io.BufferedReader):
    """A file of which no more than the limit is read at once: a damaged archive states a directory of any size."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_PICKLE_BYTES:
            raise zipfile.BadZipFile(f"its directory states {size} bytes, more than the limit of {MAX_PICKLE_BYTES}")
        return super().read(size)


@dataclass(frozen=True)
class _Archive:
    """The checked directory of a zip; `prefix` is the folder within it that all records of `torch.save` are in."""

    path: Path
    records: dict[str, _Record]
    prefix: str

    @property
    def pickle_name(self) -> str:
        return f"{self.prefix}data.pkl"

    @classmethod
    def read(cls, path: Path, file: BinaryIO) -> "_Archive":
        """Read the directory and all local headers.

        Raises:
            CheckpointError: the archive is damaged, or has records that cannot be read in place.
        """
        try:
            with zipfile.ZipFile(_CappedFile(io.FileIO(file.fileno(), closefd=False))) as archive:
                infos, end = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError, struct.error) as error:
            raise CheckpointError(f"{path}: its zip directory is damaged ({error}): {DOWNLOAD_AGAIN}") from error
        if any(info.filename.endswith("/constants.pkl") for info in infos):
            fail(path, "a TorchScript archive, which holds code", "take the file with the model's state dict")
        records = [_read_record(path, file, info) for info in infos]
        if twice := [name for name, count in Counter(record.name for record in records).items() if count > 1]:
            fail(path, f"the record {shorten(twice[0])} is in the archive twice")
        records.sort(key=lambda record: record.begin)
        for record, begin in zip(records, [*(record.begin for record in records[1:]), end], strict=True):
            if record.offset + record.nbytes > begin:
                what = f"ends at byte {record.offset + record.nbytes}, and the next one begins at byte {begin}"
                fail(path, f"the record {shorten(record.name)} at byte {record.offset} {what}")
        pickles = [record.name for record in records if record.name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            fail(path, f"a zip with {len(pickles)} data.pkl instead of one, not a file of torch.save")
        prefix = pickles[0].removesuffix("data.pkl")
        return cls(path, {record.name: record for record in records}, prefix)

    def pickle(self, file: BinaryIO) -> bytes:
        """Return the pickle; its checksum and the byte order are checked."""
        record = self.records[self.pickle_name]
        if record.nbytes > MAX_PICKLE_BYTES:
            what = f"its data.pkl at byte {record.offset} has {record.nbytes} bytes, more than {MAX_PICKLE_BYTES}"
            fail(self.path, what, "save the tensors alone, in several files with an index")
        order = self.records.get(f"{self.prefix}byteorder")
        if order is not None and os.pread(file.fileno(), 8, order.offset)[: order.nbytes] != b"little":
            fail(self.path, f"the byte order at byte {order.offset} is not little", _save_again(self.path))
        return self._bytes_of(file, record)

    def _bytes_of(self, file: BinaryIO, record: _Record) -> bytes:
        data = os.pread(file.fileno(), record.nbytes, record.offset)
        if zlib.crc32(data) != record.checksum:
            fail(self.path, f"the checksum of {shorten(record.name)} at byte {record.offset} differs")
        return data


def _read_record(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> _Record:
    """Check a record's local header and return where its bytes are."""
    where = f"the record {shorten(info.filename)} at byte {info.header_offset}"
    if info.flag_bits & _IS_ENCRYPTED:
        fail(path, f"{where} is encrypted", "take a copy that is not")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        fail(path, f"{where} is compressed, and cannot be read in place", _save_again(path))
    if not 0 <= info.header_offset < os.fstat(file.fileno()).st_size:
        fail(path, f"{where} begins outside the file", TRUNCATED)
    local = os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset)
    if len(local) < _LOCAL_HEADER.size or not local.startswith(_LOCAL_SIGNATURE):
        fail(path, f"{where} begins with {local[:4]!r} instead of a zip's local header")
    _, flags, method, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local)
    begin = info.header_offset + _LOCAL_HEADER.size
    name = os.pread(file.fileno(), name_bytes, begin)
    stated = info.orig_filename.encode("utf-8" if info.flag_bits & _IS_UTF_8 else "cp437")
    if name != stated or flags & _IS_ENCRYPTED or method != zipfile.ZIP_STORED:
        fail(path, f"{where} has a local header that differs from the directory: {shorten(repr(name))}")
    return _Record(info.filename, info.header_offset, begin + name_bytes + extra_bytes, info.file_size, info.CRC)


@dataclass(frozen=True)
class _Global:
    """What the pickle names: a function or class, which stays a name."""

    name: str


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class _Tensor:
    """Arguments of `torch._utils._rebuild_tensor_v2` or `_v3`, unchecked."""

    function: str
    arguments: tuple[Any, ...]


_PUSHES: Final = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"))
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Final[Mapping[str, type]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NO_EFFECT: Final = ("PROTO", "FRAME")


class _Machine:
    """Interprets a pickle and calls nothing ([Note: pickles without their danger]).

    Args:
        begin: where the pickle begins in the file, for messages.
    """

    def __init__(self, path: Path, begin: int) -> None:
        self._path, self._begin, self._position = path, begin, 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> object:
        """Return what the pickle describes, of dicts, lists, tuples, numbers, texts, `_Global` and `_Tensor`.

        Raises:
            CheckpointError: a global or an instruction that tensors do not need, or a damaged pickle.
        """
        try:
            for instruction, argument, position in pickletools.genops(data):
                self._position = position or 0
                if instruction.name == "STOP":
                    return self._stack.pop()
                self._step(instruction.name, argument)
        except CheckpointError:
            raise
        except (ValueError, LookupError) as error:
            self._fail(f"its pickle is damaged ({error!s:.100})", DOWNLOAD_AGAIN)
        raise AssertionError("genops raises ValueError for a pickle without STOP")

    def _fail(self, what: str, remedy: str = _NO_CODE) -> NoReturn:
        fail(self._path, f"byte {self._begin + self._position}: {what}", remedy)

    def _step(self, name: str, argument: Any) -> None:
        if name in _PUSHES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self._stack.append(tuple(self._popped(_TUPLES[name])))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "MARK":
            if len(self._marked) >= MAX_MARKS:
                raise ValueError("nested too deeply")
            self._marked.append(self._stack)
            self._stack = []
        elif name == "TUPLE":
            items = tuple(self._since_mark())
            self._stack.append(items)
        elif (step := _STEPS.get(name)) is not None:
            step(self)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._name_global(argument)
        elif name not in _NO_EFFECT:
            self._fail(f"its pickle has the instruction {name}")

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("the stack is empty")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _name_global(self, argument: str | None) -> None:
        module, name = self._popped(2) if argument is None else argument.split(" ", 1)
        full = f"{module}.{name}" if type(module) is type(name) is str else "no text"
        if full not in _GLOBALS:
            self._fail(f"its pickle asks for {shorten(full)}")
        self._stack.append(_Global(full))

    def _call(self) -> None:
        function, arguments = self._popped(2)
        called = function.name if isinstance(function, _Global) else f"a {_kind(function)}"
        if type(arguments) is not tuple:
            raise ValueError("REDUCE takes a tuple")
        if called == _ORDERED_DICT and not arguments:
            self._stack.append({})
        elif called in _COLLECTIONS:
            self._stack.append(arguments)
        elif called in _TENSORS:
            self._stack.append(_Tensor(called, arguments))
        elif called in _PARAMETERS and arguments and isinstance(arguments[0], _Tensor):
            self._stack.append(arguments[0])
        else:
            self._fail(f"its pickle calls {called} with {len(arguments)} arguments")

    def _set_state(self) -> None:
        """Drop the attributes of an OrderedDict, as those of `nn.Module.state_dict`."""
        target, _ = self._popped(2)
        if type(target) is not dict:
            self._fail(f"its pickle sets attributes of a {_kind(target)}")
        self._stack.append(target)

    def _take_storage(self) -> None:
        match self._stack.pop():
            case ("storage", _Global(name), str(key), _, int(numel)) if name in _STORAGES and numel >= 0:
                self._stack.append(_Storage(key, _STORAGES[name], numel))
            case _:
                raise ValueError("a persistent id that is no storage")

    def _append(self) -> None:
        self._extend([self._stack.pop()])

    def _append_marked(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("items for what is no list")
        self._stack[-1].extend(items)

    def _set_item(self) -> None:
        self._update(self._popped(2))

    def _set_marked_items(self) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        keys = items[::2]
        if type(self._stack[-1]) is not dict or len(items) % 2 or not all(type(key) in (str, int) for key in keys):
            raise ValueError("items for what is no dict, or keys that are no texts or integers")
        self._stack[-1].update(zip(keys, items[1::2], strict=True))


_STEPS: Final[Mapping[str, Callable[[_Machine], None]]] = {
    "REDUCE": _Machine._call,
    "BUILD": _Machine._set_state,
    "BINPERSID": _Machine._take_storage,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._append_marked,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_marked_items,
}


def _kind(value: object) -> str:
    return "tensor" if isinstance(value, _Tensor) else type(value).__name__.strip("_").lower()


def _find_tensors(path: Path, value: object) -> tuple[str, dict[Any, _Tensor]]:
    """Return the tensors by name, and the subscripts that lead to them, such as "['state_dict']"."""
    inside = ""
    for _ in range(len(WRAPPERS)):
        if type(value) is not dict:
            fail(path, f"its pickle holds a {_kind(value)}{f' in {inside}' if inside else ''}, no dict of tensors")
        if all(isinstance(each, _Tensor) for each in value.values()):
            return inside, value
        if len(wrappers := [key for key in WRAPPERS if type(value.get(key)) is dict]) != 1:
            break
        inside, value = f"{inside}[{wrappers[0]!r}]", value[wrappers[0]]
    assert type(value) is dict
    others = [f"{shorten(str(key))} (a {_kind(each)})" for key, each in value.items() if not isinstance(each, _Tensor)]
    holds = f"beside {len(value) - len(others)} tensors its pickle holds {listed(others)}"
    fail(path, f"{holds}, and not one dict of tensors under {', '.join(WRAPPERS)}", "save a dict of its tensors alone")


def _entry(archive: _Archive, inside: str, name: object, tensor: _Tensor) -> TensorEntry:
    """Return the checked entry of a tensor."""
    path = archive.path
    try:
        if not isinstance(name, str) or name.encode("utf-8", "replace").decode() != name:
            raise ValueError("its name is no text")
        layout = _Layout.of(tensor)
        record = archive.records.get(f"{archive.prefix}data/{layout.storage.key}")
        if record is None:
            raise ValueError(f"the archive has no record {shorten(f'{archive.prefix}data/{layout.storage.key}')}")
        if record.nbytes != layout.storage.nbytes:
            states = f"its pickle states {layout.storage.nbytes}"
            raise ValueError(f"its storage at byte {record.offset} has {record.nbytes} bytes, but {states}")
        if layout.is_row_major and layout.begin + layout.nbytes > record.nbytes:
            ends = f"ends at byte {layout.begin + layout.nbytes} of its storage, which has {record.nbytes}"
            raise ValueError(f"{layout.dtype} of shape {list(layout.shape)} {ends} at byte {record.offset}")
    except ValueError as error:
        fail(path, f"tensor {shorten(str(name))}: {error}")
    if not layout.is_row_major:
        loaded = f"torch.load(path, weights_only=True){inside}.items()"
        fail(
            path,
            f"tensor {shorten(name)}, whose storage is at byte {record.offset}: its values are transposed, expanded or "
            f"negated (strides {list(layout.strides)} of shape {list(layout.shape)}), and cannot be read in place",
            _save_again(path, f"{{n: t.resolve_conj().resolve_neg().contiguous() for n, t in {loaded}}}"),
        )
    return TensorEntry(name, layout.dtype, layout.shape, path, record.offset + layout.begin, layout.nbytes)


@dataclass(frozen=True)
class _Layout:
    """Where a tensor's values are in its storage; `begin` is in bytes."""

    storage: _Storage
    dtype: torch.dtype
    begin: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_row_major: bool

    @classmethod
    def of(cls, tensor: _Tensor) -> "_Layout":
        """Check what the pickle states of a tensor.

        Raises:
            ValueError: what is wrong.
        """
        match tensor.arguments:
            case (_Storage() as storage, int(first), tuple(shape), tuple(strides), _, _, *more):
                dtype = storage.dtype
            case _:
                raise ValueError("its description is malformed")
        if tensor.function == _TENSORS[1]:
            stated, *more = more or [None]
            if not isinstance(stated, _Global) or stated.name not in _DTYPES:
                raise ValueError("its dtype is none of torch's")
            dtype = _DTYPES[stated.name]
        if not all(type(n) is int and 0 <= n <= MAX_DIMENSION for n in (first, *shape, *strides)):
            raise ValueError("its offset, shape or strides are no natural numbers of 64 bits")
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"its shape has {len(shape)} dimensions, its strides {len(strides)}")
        numel, is_row_major = 1, not any(more)  # what follows states that values are negated or conjugated
        for dimension, stride in zip(reversed(shape), reversed(strides), strict=True):
            is_row_major &= dimension == 1 or stride == numel
            numel *= dimension
            if numel > MAX_NATURAL:
                raise ValueError(f"its shape {list(shape)} overflows 64 bits")
        size = dtype.itemsize
        return cls(storage, dtype, first * size, numel * size, shape, strides, is_row_major or numel == 0)
