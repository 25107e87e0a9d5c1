"""Sources include what they use. The usual build has torch's headers, or JSON's, precompiled into every file
(cmake/Precompiled.cmake), so a missing include shows only where that is off: in a wheel, after a quarter of an hour.
Here the headers each source reaches by itself are followed on paper, in seconds, and looked through for the names it
uses. What it cannot see is an operator: `a * b` of two tensors wants <ATen/TensorOperators.h>."""

import functools
import re
from pathlib import Path

from commands import ROOT
from torch.utils import cpp_extension

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENTS_AND_STRINGS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
FOLDERS = [ROOT / "include", ROOT / "src", *map(Path, cpp_extension.include_paths())]

# A name of std, and the header that has to be among those a source reaches.
STANDARD = {
    "algorithm": "sort stable_sort find find_if any_of all_of none_of transform copy_n fill_n max_element clamp",
    "array": "array",
    "atomic": "atomic",
    "bit": "bit_cast bit_ceil popcount countr_zero",
    "chrono": "chrono",
    "cmath": "sqrt exp log pow lround isfinite isnan floor ceil",
    "condition_variable": "condition_variable",
    "cstdlib": "getenv strtol",
    "cstring": "memcpy memset memcmp strlen strerror",
    "deque": "deque",
    "filesystem": "filesystem",
    "fstream": "ifstream ofstream",
    "functional": "function reference_wrapper",
    "iostream": "cout cerr cin",
    "limits": "numeric_limits",
    "map": "map multimap",
    "memory": "unique_ptr shared_ptr make_unique make_shared",
    "mutex": "mutex lock_guard unique_lock scoped_lock once_flag call_once",
    "numeric": "accumulate iota inner_product",
    "optional": "optional nullopt",
    "random": "mt19937 mt19937_64 uniform_int_distribution",
    "set": "set",
    "span": "span",
    "sstream": "ostringstream istringstream stringstream",
    "stdexcept": "runtime_error invalid_argument logic_error out_of_range",
    "string": "string to_string stoi stoll stod getline",
    "string_view": "string_view",
    "thread": "thread jthread this_thread",
    "tuple": "tuple make_tuple tie",
    "unordered_map": "unordered_map",
    "unordered_set": "unordered_set",
    "utility": "pair exchange",
    "variant": "variant visit holds_alternative",
    "vector": "vector",
}
HEADER_OF = {name: header for header, names in STANDARD.items() for name in names.split()}
OPERATORS = {path.stem for path in (FOLDERS[2] / "ATen/ops").glob("[a-z]*.h")}


@functools.cache
def read(path):
    text = path.read_text(errors="replace")
    return text, INCLUDE.findall(text)


@functools.cache
def find(name, folder):
    places = [*([folder] if folder else []), *FOLDERS]
    return next((place / name for place in places if (place / name).is_file()), None)


def reached(source):
    """The headers a source includes, itself or through others, by the names they are included under."""
    names, todo, seen = set(), [source], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for kind, name in read(path)[1]:
            names.add(name)
            if (found := find(name, path.parent if kind == '"' else None)) is not None:
                todo.append(found)
    return names


def missing(source):
    """(name, header) of what a source uses and does not reach the header of."""
    text, names = COMMENTS_AND_STRINGS.sub('""', read(source)[0]), reached(source)
    used = {(f"std::{name}", HEADER_OF[name]) for name in re.findall(r"\bstd::(\w+)", text) if name in HEADER_OF}
    if "ATen/ATen.h" not in names and "torch/torch.h" not in names:
        calls = re.findall(r"\bat::(\w+)\(", text)
        used |= {(f"at::{name}", f"ATen/ops/{name}.h") for name in calls if name in OPERATORS}
        if re.search(r"\b(NoGradGuard|AutoGradMode|GradMode)\b", text) and "c10/core/GradMode.h" not in names:
            used.add(("at::NoGradGuard", "ATen/core/grad_mode.h"))
    if source.suffix == ".cpp" and re.search(r"\bnlohmann::", text):
        used.add(("nlohmann::json", "nlohmann/json.hpp"))
    return sorted((name, header) for name, header in used if header not in names)


def sources():
    return [
        path for folder in ("src", "include") for path in (ROOT / folder).rglob("*") if path.suffix in {".cpp", ".h"}
    ]


def test_a_header_that_only_the_precompiled_one_brought_is_missed(tmp_path):
    text = (
        "#include <ATen/core/Tensor.h>\nauto f() { at::NoGradGuard guard; return at::empty({1}); }\nnlohmann::json j;\n"
    )
    without, within = tmp_path / "without.cpp", tmp_path / "within.cpp"
    without.write_text(text)
    wanted = ["ATen/core/grad_mode.h", "ATen/ops/empty.h", "nlohmann/json.hpp"]
    within.write_text("".join(f"#include <{header}>\n" for header in wanted) + text)
    assert [header for _, header in missing(without)] == wanted
    assert missing(within) == []


def test_a_source_reaches_the_header_of_every_name_it_uses():
    faults = [
        f"{path.relative_to(ROOT)} uses {name} without <{header}>"
        for path in sources()
        for name, header in missing(path)
    ]
    assert faults == []
