"""Translate preprocessed Metal text to C++ for clang with a few rules that preserve line numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ANGLES = r"<(?:[^<>;{}]|<(?:[^<>;{}]|<[^<>;{}]*>)*>)*>"
TYPE = rf"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*(?:\s*{ANGLES})?(?:::\w+)*"
VECTOR = r"(?:(?:bool|u?char|u?short|u?int|u?long|half|float|bfloat)[234])"
ABI = (Path(__file__).parent / "include" / "abi.h").read_text()
ATTRIBUTES = set(re.findall(r"(\w+)\[3\]", ABI))  # thread attributes, such as thread_position_in_grid
STRING = r'"(?:\\.|[^"\\])*"'


class TranslationError(ValueError):
    """Error for a text that Metal forbids or that the harness does not support."""


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter with `[[buffer(index)]]`, or with a thread attribute if index is None."""

    name: str
    index: int | None
    attribute: str
    constant: bool
    optional: bool


def lines_of(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield each line of a text with #line or preprocessor markers as (file, number, line)."""
    file, number = "", 0
    for line in text.split("\n"):
        if marker := re.match(r'#\s*(?:line\s+)?(\d+)\s+"(.*?)"', line):
            number, file = int(marker[1]), marker[2]
            continue
        yield file, number, line
        number += 1


def translate(text: str, name: str | None, constants: Mapping[int | str, object]) -> str:
    """Rewrite preprocessed Metal as C++ for the kernel `name`, or to check all kernels if `name` is None."""
    hosts: dict[str, str] = {}
    text = _instantiations(text, hosts)
    kernels = _kernels(text)
    text = _function_constants(text, constants)
    text = re.sub(r"\bkernel(?=\s+void\b)|\[\[(?:[^\[\]]|\[[^\[\]]*\])*\]\]", _keep_newlines, text)
    text = _threadgroup_objects(text)
    if wide := re.search(r"\b(?:device|constant|threadgroup)\s+(?:const\s+)?u?long[34]\b", text):
        _fail(text, wide.start(), "vectors of 32 bytes in memory are not modeled: no callback sees them")
    # Write array parameters as pointers, because clang rejects address spaces on arrays.
    text = re.sub(
        rf"\b((?:device|constant|threadgroup)\s+(?:const\s+)?{TYPE})\s+(\w+)\s*\[[^\[\]]*\](?=\s*[,)])", r"\1* \2", text
    )
    text = _vectors(text)
    text = _literals(text)
    if name is None:
        wanted = hosts.values() or [k for k in kernels if not re.search(rf"<.*?>\s*void\s+{k}\s*\(", text)]
        uses = (f"[[gnu::used]] auto* const msl_use_{i} = &{kernel};" for i, kernel in enumerate(wanted))
        return text + '\n#line 1 "entry"\n' + "\n".join(uses) + "\n"
    return text + _entry(hosts.get(name, name), kernels)


def _keep_newlines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _fail(text: str, at: int, message: str) -> None:
    file, number, line = list(lines_of(text[: text.find("\n", at)]))[-1]
    raise TranslationError(f"{message} at {file}:{number}: `{line.strip()}`")


def _instantiations(text: str, hosts: dict[str, str]) -> str:
    """Remove `template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;`, and add x -> f<T> to `hosts`."""

    def take(match: re.Match[str]) -> str:
        host = "".join(part[1:-1] for part in re.findall(STRING, match[1]))
        hosts[host] = match[2].strip()
        return _keep_newlines(match)

    pattern = rf"template\s*\[\[\s*host_name\(((?:\s*{STRING})+)\s*\)\s*\]\]\s*\[\[\s*kernel[^\]]*\]\]\s*"
    pattern += rf"decltype\((.*?)\)\s*[\w:]+\s*(?:{ANGLES})?\s*;"
    return re.sub(pattern, take, text, flags=re.S)


def _split(parameters: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, char in enumerate(parameters):
        depth += (char in "([{<") - (char in ")]}>")
        if char == "," and depth == 0:
            parts.append(parameters[start:at])
            start = at + 1
    return [*parts, parameters[start:]] if parameters.strip() else []


def _kernels(text: str) -> dict[str, list[Parameter]]:
    kernels = {}
    for match in re.finditer(
        r"(?:\[\[\s*kernel\b[^\]]*\]\]|\bkernel\b)\s*(?:\[\[[^\]]*\]\]\s*)?void\s+(\w+)\s*\(", text
    ):
        end, depth = match.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        kernels[match[1]] = _parameters(text[match.end() : end - 1], match[1])
    return kernels


def _parameters(text: str, kernel: str) -> list[Parameter]:
    texts = _split(re.sub(r"(?m)^#.*$", "", text))
    explicit = {int(index) for index in re.findall(r"\bbuffer\((\d+)\)", text)}
    free = (index for index in range(31) if index not in explicit)
    found = []
    for parameter in texts:
        attributes = " ".join(re.findall(r"\[\[(.*?)\]\]", parameter, re.S))
        declaration = re.sub(r"\[\[.*?\]\]", "", parameter, flags=re.S)
        name = re.findall(r"\w+", declaration)[-1]
        buffer = re.search(r"\bbuffer\((\d+)\)", attributes)
        attribute = "".join(re.findall(r"^\s*(\w+)", attributes))
        in_memory = bool(re.search(r"[*&]", declaration)) and attribute in ("", "buffer", "function_constant")
        if in_memory == (attribute in ATTRIBUTES) or "threadgroup" in declaration.split():
            raise TranslationError(f"kernel {kernel}: parameter `{' '.join(parameter.split())}` is not modeled")
        index = int(buffer[1]) if buffer else next(free) if in_memory else None
        constant, optional = bool(re.search(r"\bconstant\b", declaration)), "function_constant" in attributes
        found.append(Parameter(name, index, attribute, constant, optional))
    return found


def _function_constants(text: str, constants: Mapping[int | str, object]) -> str:
    given: dict[str, bool] = {}

    def declare(match: re.Match[str]) -> str:
        kind, name, index = match[1], match[2], int(match[3], 0)
        value = constants.get(index, constants.get(name))
        given[name] = value is not None
        if value is None:  # a kernel that uses the constant does not link
            return f"extern constant const {kind} {name};" + _keep_newlines(match)
        return f"constant const {kind} {name} = {kind}({str(value).lower()});" + _keep_newlines(match)

    text = re.sub(rf"\bconstant\s+({TYPE})\s+(\w+)\s*\[\[\s*function_constant\(\s*(\w+)\s*\)\s*\]\]\s*;", declare, text)
    return re.sub(r"\bis_function_constant_defined\(\s*(\w+)\s*\)", lambda m: str(given.get(m[1], False)).lower(), text)


def _threadgroup_objects(text: str) -> str:
    """Replace `threadgroup T a[N];` by a reference to memory that the runtime registers by name."""
    numbers = iter(range(1000))

    def declare(match: re.Match[str]) -> str:
        kind, out = match[1], []
        for declarator in _split(match[2]):
            name, extents = re.fullmatch(r"\s*(\w+)\s*(.*?)\s*", declarator, re.S).groups()  # type: ignore[union-attr]
            number = next(numbers)
            alias = f"msl_shared_{number}"
            storage = f'msl_shared({number}, sizeof({alias}), msl::granule<{kind}>, "{name}")'
            out.append(f"typedef threadgroup {kind} {alias}{extents}; {alias}& {name} = *({alias}*){storage};")
        return " ".join(out)

    extents = r"(?:\s*\[[^;{}]*?\])*"
    declarators = rf"\w+{extents}(?:\s*,\s*\w+{extents})*"
    return re.sub(rf"\bthreadgroup\s+({TYPE})\s+({declarators})\s*;", declare, text)


def _vectors(text: str) -> str:
    """Rewrite `float4(a, b)` and `static_cast<float4>(x)` as calls, because clang's vector casts reinterpret bits."""
    vector = rf"(?:metal::)?(?:vec\s*{ANGLES}|\b{VECTOR}\b)"
    aliases = re.findall(rf"\busing\s+(\w+)\s*=\s*{vector}\s*;|\btypedef\s+{vector}\s+(\w+)\s*;", text)
    vector = "|".join([vector, *{rf"\b{a or b}\b" for a, b in aliases}])

    def make(match: re.Match[str]) -> str:
        before = text[max(0, match.start() - 12) : match.start()].rstrip()
        if re.search(r"(?:\boperator|::|\.)$", before):
            return match[0]
        return f"msl::make<{match[1] or match[2]}>("

    for cast in re.finditer(rf"\(\s*(?:{vector})\s*\)\s*[\w(]", text):
        if not re.search(r"[\w\])>]\s*$", text[max(0, cast.start() - 20) : cast.start()]):
            _fail(text, cast.start(), "write T(x) instead of the cast (T)x of a vector")
    return re.sub(rf"(?<![\w:])(?:static_cast\s*<\s*({vector})\s*>|({vector}))\s*\((?!&|\*\))", make, text)


def _literals(text: str) -> str:
    """Give floating-point literals the type float, half or bfloat, because Metal has no double."""
    number = r"(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][+-]?\d+"
    kinds = {"": "{}f", "f": "{}f", "h": "half({}f)", "bf": "bfloat({}f)"}

    def rewrite(match: re.Match[str]) -> str:
        if match["double"]:
            _fail(text, match.start(), "Metal has no double")
        return kinds[match["suffix"].lower()].format(match["number"]) if match["number"] else match[0]

    pattern = (
        rf"(?m)^#.*$|{STRING}|\b(?P<double>double)\b|(?<![\w.])(?P<number>{number})(?P<suffix>bf|BF|[fFhH]|)(?!\w)"
    )
    return re.sub(pattern, rewrite, text)


def _entry(kernel: str, kernels: Mapping[str, list[Parameter]]) -> str:
    base = re.match(r"[\w:]+", kernel)
    if not base or base[0].split("::")[-1] not in kernels:
        raise TranslationError(f"no kernel {kernel}; the text has {', '.join(sorted(kernels)) or 'none'}")
    parameters = kernels[base[0].split("::")[-1]]
    describe, arguments = [], []
    for i, p in enumerate(parameters):
        kind = f"msl_types::type<{i}>"
        if p.index is None:
            arguments.append(f"msl::given<{kind}>(c->{p.attribute})")
        else:
            arguments.append(f"msl::given<{kind}>(c->buffer[{p.index}])")
            flags = f"{str(p.constant).lower()}, {str(p.optional).lower()}"
            describe.append(f'msl::describe<{kind}>("{p.name}", {p.index}, {flags}), ')
    return (
        f'\n#line 1 "entry"\nusing msl_types = msl::argument<decltype({kernel})>;\n'
        f'extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];\n'
        f'extern "C" const char* const msl_library[] = {{__ehdr_start, _end}};\n'
        f'extern "C" const msl::parameter msl_parameters[] = {{{"".join(describe)}{{}}}};\n'
        f'extern "C" MSL_RAW void msl_entry(const msl::context* c) {{ {kernel}({", ".join(arguments)}); }}\n'
    )
