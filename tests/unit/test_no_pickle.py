"""Nothing in the product unpickles: bytes from a wire or a file never decide what code runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinpool

ROOT = Path(twinpool.__file__).parent
FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "multiprocessing",
}  # fmt: skip
ALLOWED_MODULES = {"multiprocessing.shared_memory"}  # plain bytes
FORBIDDEN_CALLS = {"torch.load", "np.load", "numpy.load", "yaml.load", "eval", "exec"}
HARMLESS = "allow_pickle=False"
"""With it numpy raises where it would have to unpickle."""


def sources() -> Iterator[Path]:
    """Every module of the product, in every room."""
    for room in (ROOT, *(path for path in ROOT.iterdir() if path.is_dir())):
        yield from (room.glob("*.py") if room == ROOT else room.rglob("*.py"))


def findings(tree: ast.AST) -> Iterator[str]:
    """What of this module unpickles or could."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if is_forbidden(name.name))
            case ast.ImportFrom(module=str(module)) if is_forbidden(module):
                yield module
            case ast.Call(func=function) if ast.unparse(function) in FORBIDDEN_CALLS:
                if HARMLESS not in map(ast.unparse, node.keywords):
                    yield ast.unparse(function)


def is_forbidden(module: str) -> bool:
    return module.partition(".")[0] in FORBIDDEN_MODULES and module not in ALLOWED_MODULES


def test_no_module_of_the_product_can_unpickle() -> None:
    modules = list(sources())
    assert len({path.parent.name for path in modules}) > 8, "the rooms were not found"
    found = {path.name: list(findings(ast.parse(path.read_text()))) for path in modules}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(x)",
        "eval(x)",
        "np.load(x, allow_pickle=y)",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert list(findings(ast.parse(text)))
