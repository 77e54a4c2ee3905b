"""Run a compiled kernel on NumPy arrays, and report faults and memory traffic."""

from __future__ import annotations

import ctypes as c
import functools
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import compile as cc
from .translate import lines_of


class Fault(AssertionError):
    """Fault of a kernel. The message is one line with kernel, buffer or array, thread and location."""

    def __init__(self, kind: str, text: str, *, kernel: str, buffer: str | None = None, where: str = "", at: str = ""):
        self.kind, self.kernel, self.buffer = kind, kernel, buffer
        super().__init__(f"{kind} {text} [kernel {kernel}{where and ', ' + where}]{at and ' at ' + at}")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer that a launch reads or writes. All fields except `lane` count whole cache lines once."""

    lane: int  # bytes that lanes request
    interval: int  # lines per simdgroup and interval between two synchronizations
    threadgroup: int  # lines per threadgroup, as with a private L1 cache of unlimited size
    dispatch: int  # lines per launch, as DRAM traffic


@dataclass(frozen=True)
class Report:
    """Grid and memory traffic of a launch."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    reads: dict[str, Traffic]
    writes: dict[str, Traffic]
    threadgroup_memory: int  # bytes of the threadgroup arrays whose declarations ran
    unwritten: int  # bytes of outputs that the launch did not write


def _struct(name: str, fields: str, **types: Any) -> type[c.Structure]:
    kinds = {"p": c.c_void_p, "s": c.c_char_p, "i": c.c_int, "u": c.c_uint32, "q": c.c_uint64} | types
    pairs = [field.split(":") for field in fields.split()]
    return type(name, (c.Structure,), {"_fields_": [(n, kinds[k]) for n, k in pairs]})


# Structures of abi.h and runtime.cpp.
_Parameter = _struct("_Parameter", "name:s index:i read_only:i optional:i size:i code:k", k=c.c_char)
_Traffic = _struct("_Traffic", "lane:q interval:q threadgroup:q dispatch:q")
_Buffer = _struct(
    "_Buffer",
    "data:p name:s bytes:q index:i read_only:i initialised:i granule:i traffic:t unwritten:q first_unwritten:q",
    t=_Traffic * 2,  # type: ignore[operator]
)
_Site = _struct("_Site", "file:s line:i column:i")
_Found = _struct(
    "_Found",
    "kind:k text:t where:w buffer:b pc:q other_pc:q at:a other:a",
    k=c.c_char * 32, t=c.c_char * 320, w=c.c_char * 160, b=c.c_char * 64, a=_Site,
)  # fmt: skip
_Launch = _struct(
    "_Launch",
    "buffers:p buffer_count:i line_bytes:i grid:d threadgroup:d seed:u entry:p library:p library_end:p "
    "threadgroup_bytes:q fault:f",
    d=c.c_uint32 * 3, f=_Found,
)  # fmt: skip

CODES = {"f": "float32", "h": "float16", "b": "uint16", "?": "bool"}


class Kernel:
    """A kernel of a Metal text, named by host name or C++ name such as `softmax<half>`. Creation compiles it."""

    def __init__(
        self,
        source: str,
        name: str,
        *,
        constants: Mapping[int | str, object] | None = None,
        include: Sequence[Path] = (),
        label: str | None = None,
    ) -> None:
        self.name = label or name
        self._source = source
        self._path = cc.build(source, name, tuple((constants or {}).items()), tuple(include))
        self._library = c.CDLL(str(self._path))
        table = (_Parameter * 32).in_dll(self._library, "msl_parameters")
        self.parameters = list(itertools.takewhile(lambda p: p.name, table))

    def __call__(
        self,
        buffers: Mapping[str, Any],
        *,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        threads: bool = True,
        seed: int = 0,
        line: int = 128,
        written: Collection[str] = (),
        partial: bool = False,
    ) -> Report:
        """Run the kernel and write the outputs in place. `grid` counts threads, or threadgroups if not `threads`.

        `written` names outputs that the kernel may read before it writes. `partial` allows unwritten outputs.
        """
        size = (*threadgroup, 1, 1)[:3]
        extent = (*grid, 1, 1)[:3]
        if not threads:
            extent = tuple(g * t for g, t in zip(extent, size, strict=True))
        if np.prod(size) > 1024:
            raise Fault("TOO MANY THREADS", f"{np.prod(size)} in a threadgroup, 1024 is the most", kernel=self.name)
        if min(*size, *extent) < 1:
            raise ValueError(f"{self.name}: grid {extent} and threadgroup {size} must be positive")
        arrays = self._arrays(buffers)
        entries = (_Buffer * len(arrays))()
        for entry, (p, array) in zip(entries, arrays, strict=True):
            entry.data, entry.name, entry.bytes, entry.index = array.ctypes.data, p.name, array.nbytes, p.index
            entry.read_only, entry.initialised = p.read_only, p.name.decode() in written
            entry.granule = p.size if p.size in (1, 2, 4, 8) else 1
        bounds = (c.c_void_p * 2).in_dll(self._library, "msl_library")
        entry_point = c.cast(self._library.msl_entry, c.c_void_p).value
        launch = _Launch(
            c.addressof(entries), len(entries), line, extent, size, seed, entry_point, bounds[0], bounds[1]
        )
        status = c.PyDLL(str(cc.runtime())).msl_launch(c.byref(launch))
        if status == 2:
            raise MemoryError("the Metal harness could not reserve its address space")
        if status:
            raise self._fault(launch.fault)
        unwritten = sum(e.unwritten for e in entries)
        for e in entries:
            if e.unwritten and not partial:
                buffer, first = e.name.decode(), e.first_unwritten
                text = f"{e.unwritten} of {e.bytes} bytes of buffer {buffer}, the first at offset {first}"
                raise Fault("UNWRITTEN OUTPUT", text, kernel=self.name, buffer=buffer)
        reads, writes = (
            {e.name.decode(): Traffic(*(getattr(e.traffic[d], n) for n, _ in _Traffic._fields_)) for e in entries}
            for d in (0, 1)
        )
        return Report(self.name, extent, size, reads, writes, launch.threadgroup_bytes, unwritten)

    def _arrays(self, buffers: Mapping[str, Any]) -> list[tuple[Any, NDArray[Any]]]:
        """Return each parameter with its array, after a check against the signature of the kernel."""
        names = [p.name.decode() for p in self.parameters]
        if unknown := set(buffers) - set(names):
            raise ValueError(f"{self.name} has no buffer {', '.join(sorted(unknown))}; it has {', '.join(names)}")
        found = []
        for p, name in zip(self.parameters, names, strict=True):
            if name not in buffers:
                if p.optional:
                    continue
                raise ValueError(f"{self.name}: buffer {name} is missing")
            code = p.code.decode()
            dtype = np.dtype(CODES.get(code, f"{code}{p.size}")) if code != "s" else None
            value = buffers[name]
            array = np.asarray(value, dtype if isinstance(value, bool | int | float) else None)
            if dtype and (array.dtype.itemsize != dtype.itemsize or (code in "fh" and array.dtype != dtype)):
                raise ValueError(f"{self.name}: buffer {name} is {dtype} in the kernel, the array is {array.dtype}")
            if p.read_only:
                array = np.ascontiguousarray(array)
            elif not (array is value and array.flags.c_contiguous and array.flags.writeable):
                raise ValueError(f"{self.name}: output {name} must be a writeable, contiguous array")
            found.append((p, array))
        return found

    def _fault(self, found: Any) -> Fault:
        text, buffer = re.sub(r"'\w+' \(aka ('.*?')\)", r"\1", found.text.decode()), found.buffer.decode()
        if buffer == "?":  # clang reported only the type of an array; read the name from the source
            buffer = self._name_at(found.at.file.decode(), found.at.line, found.at.column)
            text = text.replace("?", buffer, 1)
        if "@" in text:
            text = text.replace("@", self._at(*self._place(found.other_pc, found.other)))
        kind, where, at = found.kind.decode(), found.where.decode(), self._at(*self._place(found.pc, found.at))
        return Fault(kind, text, kernel=self.name, buffer=buffer or None, where=where, at=at)

    def _at(self, file: str, line: int) -> str:
        text = self._lines.get((file, line), "")
        if not text and Path(file).is_file():
            text = Path(file).read_text().split("\n")[line - 1]
        return f"{file}:{line}: `{text.strip()}`"

    @functools.cached_property
    def _lines(self) -> dict[tuple[str, int], str]:
        return {(file, number): line for file, number, line in lines_of('#line 1 "source"\n' + self._source)}

    def _name_at(self, file: str, line: int, column: int) -> str:
        """Return the identifier before the bracket at a location of the translated text."""
        for f, n, text in lines_of(self._path.with_suffix(".cpp").read_text()):
            if (f, n) == (file, line) and (name := re.match(r"\w+", text[column - 1 :])):
                return name[0]
        return "?"

    def _place(self, pc: int, site: Any) -> tuple[str, int]:
        """Return file and line of an instruction from the debug line table of the library, or `site` if pc is 0."""
        if not pc:
            return site.file.decode(), site.line
        return max((row for row in _line_table(self._path) if row[0] <= pc), default=(0, "?", 0))[1:]


@functools.cache
def _line_table(path: Path) -> list[tuple[int, str, int]]:
    from elftools.elf.elffile import ELFFile

    rows = []
    with path.open("rb") as stream:
        dwarf = ELFFile(stream).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            program = dwarf.line_program_for_CU(unit)
            files = program.header.file_entry
            for entry in program.get_entries():
                if (row := entry.state) and row.line and not row.end_sequence:
                    rows.append((row.address, files[row.file - 1].name.decode(), row.line))
    return rows
