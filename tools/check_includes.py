#!/usr/bin/env python3
"""Holds every #include to the layers and to the one home of each outside dependency.

    tools/check_includes.py [REPOSITORY]

A file of src/<layer> or include/pagedkv/<layer> includes its own layer and layers to its left:
base, kernels, core, tiers, models, engine, server, apps. Public headers (include/pagedkv) include public headers and
the C++ standard library alone; the Python module (python/src) public headers, its own and nanobind's. An outside header
is allowed in its home only (HOMES). tests and bench may include
anything. Prints each offender as path:line: reason; exit status 1 if there is one.
"""

import pathlib
import re
import sys

LAYERS = ["base", "kernels", "core", "tiers", "models", "engine", "server", "apps"]

# Outside headers by how their name begins, and the folders below src that may include them.
HOMES = {
    "hwy/": ["kernels/cpu"],
    "cuda": ["kernels/cuda"],
    "openssl/": ["core"],
    "isa-l": ["tiers"],
    "lmdb.h": ["tiers"],
    "hiredis/": ["tiers"],
    "nlohmann/": ["tiers", "models", "engine", "server", "apps"],
    "ggml": ["models/ggml"],
    "gguf.h": ["models/ggml"],
    "llama": ["models/ggml"],
    "prometheus/": ["engine"],
    "cpp-httplib/": ["server"],
    "CLI/": ["apps"],
    "spdlog/": ["apps"],
    "histedit.h": ["apps"],
    "toml++/": ["apps"],
}
# llama-common's headers have names like common.h and log.h: what is unknown here is taken to be one of them.
LLAMA_COMMON_HOME = "models/ggml"

# POSIX, Linux and compiler headers that any layer may use, public headers excepted.
SYSTEM = re.compile(
    r"(sys|linux|netinet|arpa)/\w+\.h|(unistd|fcntl|sched|pthread|signal|dlfcn|poll|dirent|termios|getopt|immintrin|cpuid|langinfo)\.h")
STANDARD = re.compile(r"[a-z_]+")  # C++ standard headers have neither folder nor suffix

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)


def includes(text):
    """(line number, name) of each #include outside block comments."""
    text = COMMENT.sub(lambda comment: "\n" * comment.group().count("\n"), text)
    for match in INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match.group(1)


def find(root, file, name):
    """The repository's own file that `name` means, as a path relative to root, or None for an outside header."""
    for folder in (file.parent, root / "src", root / "include"):
        path = (folder / name).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root)
    return None


def layer_of(path):
    """The layer of a file under src or include/pagedkv (path relative to the repository), else None."""
    for top in (("src",), ("include", "pagedkv")):
        if path.parts[: len(top)] == top and len(path.parts) > len(top) + 1:
            return path.parts[len(top)]
    return None


def is_below(path, home):
    return path.parts[1 : 1 + home.count("/") + 1] == tuple(home.split("/"))


def why_the_python_module_may_not(root, file, name):
    own = find(root, root / file, name)
    if own is not None:
        return None if own.parts[0] in ("include", "python") else f"the Python module includes {name}, which is not public"
    if STANDARD.fullmatch(name) or SYSTEM.fullmatch(name) or name.startswith("nanobind/") or name in ("Python.h", "cxxabi.h"):
        return None
    return f"the Python module includes {name}; only pagedkv/, nanobind/ and standard headers are allowed"


def why_not(root, file, name):
    """Why `file` (relative to root) may not include `name`; None when it may."""
    if file.parts[0] == "python":
        return why_the_python_module_may_not(root, file, name)
    layer = layer_of(file)
    public = file.parts[0] == "include"
    own = find(root, root / file, name)
    if own is not None:
        if layer_of(own) not in LAYERS:
            return f"{name} belongs to no layer"
        if LAYERS.index(layer_of(own)) > LAYERS.index(layer):
            return f"{name} is of layer {layer_of(own)}, to the right of {layer}"
        if public and own.parts[0] != "include":
            return f"a public header includes {name}, which is not public"
        return None
    if STANDARD.fullmatch(name):
        return None
    if public:
        return f"a public header includes {name}; only pagedkv/ and standard headers are allowed"
    for beginning, homes in HOMES.items():
        if name.startswith(beginning):
            return None if any(is_below(file, home) for home in homes) else f"{name} may be included only in " + ", ".join(
                f"src/{home}" for home in homes)
    if SYSTEM.fullmatch(name) or is_below(file, LLAMA_COMMON_HOME):
        return None
    return f"{name} is not found, and as an outside header it has no home in tools/check_includes.py"


def offenders(root):
    """Every include that breaks a rule, as (path, line, reason); a folder that is no layer is one too."""
    root = root.resolve()
    for top in ("include/pagedkv", "src", "python/src"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in {".h", ".cpp", ".cu", ".cuh", ".inl"}:
                continue
            file = path.relative_to(root)
            if top != "python/src" and layer_of(file) not in LAYERS:
                yield file, 1, "is in no layer's folder"
                continue
            for line, name in includes(path.read_text(encoding="utf-8")):
                reason = why_not(root, file, name)
                if reason:
                    yield file, line, reason


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent)
    if not (root / "src").is_dir():
        print(f"{root} has no src folder", file=sys.stderr)
        return 2
    found = list(offenders(root))
    for file, line, reason in found:
        print(f"{file}:{line}: {reason}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
