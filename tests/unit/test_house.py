"""The house rules of the architecture: sizes, who may import whom, and what every file and function has."""

import ast
import re
import sys
from pathlib import Path

import pytest

import freshper

PACKAGE = Path(freshper.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(Path(__file__).parents[1].rglob("*.py"))
FILE_LINES, FUNCTION_LINES, LOOP_LINES = 400, 60, 120

EVERYWHERE = {"trajectory", "errors"}
# Room -> the rooms it may import. What a room imports of itself is its own affair, but for cycles.
MAY_IMPORT = {
    "errors": set(),
    "trajectory": {"errors"},  # a record that validates itself raises the error of that name
    "cache_folder": {"errors"},
    "replay": EVERYWHERE,
    "envs": EVERYWHERE | {"cache_folder"},
    "policies": EVERYWHERE | {"cache_folder"},
    "rollout": EVERYWHERE | {"envs.core", "policies.core"},
    "learning": EVERYWHERE,
    "training": EVERYWHERE | {"cache_folder", "replay", "envs", "policies", "rollout", "learning"},
    "distributed": EVERYWHERE | {"training", "replay", "envs", "policies", "rollout", "learning"},
    "reports": EVERYWHERE,
    "integrations": EVERYWHERE | {"replay"},
    "cli": {"training", "distributed", "reports", "replay", "envs", "errors", "__init__"},  # __init__: the version
    "__main__": {"cli"},
    "__init__": {"replay", "trajectory", "errors"},
}
LIGHT = ("errors", "trajectory", "replay", "envs", "rollout", "reports", "__init__", "cli", "__main__")
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numba", "scipy", "plotly", "gymnasium"}
LIBRARIES = {"errors": set(), "trajectory": {"numpy"}, "replay": {"numpy"}, "rollout": {"numpy"}, "__init__": set()}


def _name(path):
    """Dotted name of a module within the package: "replay.buffer", "replay" for its __init__, "__init__" for ours."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


MODULES = {_name(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def _room(name):
    return name.partition(".")[0]


def _imports(name, nodes=None):
    """(absolute dotted name, line) of everything that a module imports, relative imports resolved."""
    package = MODULES[name].relative_to(PACKAGE).parent.parts
    for node in ast.walk(TREES[name]) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ("freshper", *package)[: len(package) + 2 - node.level]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def _own(name, nodes=None):
    """(module of ours, line) for every import of ours: the longest part of its name that is a module."""
    for imported, line in _imports(name, nodes):
        top, _, inside = imported.partition(".")
        if top != "freshper":
            continue
        while inside and inside not in MODULES:
            inside = inside.rpartition(".")[0]
        yield inside or "__init__", line


def _top_level(tree):
    """The statements that run on import: not those in functions, and not what only type checkers read."""
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield from (
            inner
            for inner in ast.walk(node)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        )


def _functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_there_is_a_house():
    assert len(MODULES) > 40
    assert {_room(name) for name in MODULES} <= MAY_IMPORT.keys()


def _where(path, line=1):
    return f"{path.relative_to(PACKAGE.parents[1])}:{line}"


def test_files_and_functions_are_short():
    long = []
    for path in [*FILES, *TESTS]:
        text = path.read_text(encoding="utf-8")
        lengths = [(path.name, 1, len(text.splitlines()), FILE_LINES)]
        lengths += [
            (f.name, f.lineno, f.end_lineno - f.lineno + 1, FUNCTION_LINES) for f in _functions(ast.parse(text))
        ]
        long += [f"{_where(path, line)} {name}: {size}" for name, line, size, limit in lengths if size > limit]
    assert long == []


def test_the_loop_is_a_story_that_fits_on_two_pages():
    assert len(MODULES["training.loop"].read_text(encoding="utf-8").splitlines()) <= LOOP_LINES


def test_rooms_import_only_what_the_table_allows():
    wrong = [
        f"{_where(path, line)} {other}"
        for name, path in MODULES.items()
        for other, line in _own(name)
        if _room(other) != _room(name) and not {_room(other), other} & MAY_IMPORT[_room(name)]
    ]
    assert wrong == []


def test_there_are_no_cycles():
    """Also through functions: a late import would only hide one. A package's __init__ counts as a module of its own."""
    edges = {name: {other for other, _ in _own(name)} - {name} for name in MODULES}
    done, path = set(), []

    def visit(name):
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            path.append(name)
            for other in sorted(edges[name]):
                visit(other)
            done.add(path.pop())

    for name in sorted(edges):
        visit(name)
    assert done == set(MODULES)


def test_light_rooms_load_nothing_heavy():
    heavy = [
        f"{_where(MODULES[name], line)} {imported}"
        for name in MODULES
        if _room(name) in LIGHT
        for imported, line in _imports(name, _top_level(TREES[name]))
        if imported.partition(".")[0] in HEAVY
    ]
    assert heavy == []


def test_the_heart_needs_numpy_only():
    needed = {
        (name, library)
        for name in MODULES
        if _room(name) in LIBRARIES
        for library in {imported.partition(".")[0] for imported, _ in _imports(name, _top_level(TREES[name]))}
        if library not in LIBRARIES[_room(name)] | sys.stdlib_module_names | {"freshper"}
    }
    assert needed == set()


def test_everything_public_is_explained():
    bare = [_where(path) for name, path in MODULES.items() if not ast.get_docstring(TREES[name])]
    for name, path in MODULES.items():
        bare += [f"{_where(path, n.lineno)} {n.name}" for n in _public(TREES[name]) if not ast.get_docstring(n)]
    assert bare == []


def _public(node):
    """Public classes and functions, methods included; what is inside a function or a private class is not."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not inner.name.startswith("_"):
            yield inner
            if isinstance(inner, ast.ClassDef):
                yield from _public(inner)
        elif isinstance(inner, ast.If | ast.Try):
            yield from _public(inner)


def test_every_function_is_annotated():
    bare = []
    for name, path in MODULES.items():
        for function in _functions(TREES[name]):
            given = function.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            without = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if without or function.returns is None:
                bare.append(f"{_where(path, function.lineno)} {function.name}({', '.join(without)})")
    assert bare == []


def test_nothing_is_left_open():
    unfinished = []
    for name, path in MODULES.items():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(r"\b(?:TODO|FIXME|XXX|HACK)\b", line):
                unfinished.append(_where(path, number))
        unfinished += [_where(path, node.lineno) for node in ast.walk(TREES[name]) if _is_unfinished(node)]
    assert unfinished == []


def _is_unfinished(node):
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    return False


def test_only_where_environments_are_called_everything_is_caught():
    broad = []
    for name, path in MODULES.items():
        for node in ast.walk(TREES[name]):
            kinds = []
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            elif isinstance(node, ast.Call) and _last(node.func) == "suppress":
                kinds = node.args
            if any(kind is None or _last(kind) in ("Exception", "BaseException") for kind in kinds):
                broad.append((_room(name), _where(path, node.lineno)))
    assert [where for room, where in broad if room not in ("rollout", "envs")] == []
    assert len([room for room, _ in broad if room == "envs"]) == 1  # faults_of
    assert broad, "an environment may raise anything, and somebody has to catch it"


def _last(node):
    return getattr(node, "id", getattr(node, "attr", None))


def test_tests_assert_something_and_do_not_sleep():
    silent, naps = [], []
    for path in TESTS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        helpers = {f.name for f in _functions(tree) if _asserts(f, set())}
        tests = [f for f in _functions(tree) if f.name.startswith("test")]
        silent += [f"{_where(path, f.lineno)} {f.name}" for f in tests if not _asserts(f, helpers)]
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        naps += [_where(path, call.lineno) for call in calls if _last(call.func) == "sleep"]
    assert silent == []
    assert naps == []


def _asserts(function, helpers):
    """Whether it asserts, expects an error or a warning, or calls a helper that does."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = _last(node.func) or ""
            if called in helpers or called in ("raises", "warns", "fail") or called.startswith(("assert_", "check_")):
                return True
    return False
