"""No module but those of `hf_gpipe/libraries/` touches a private or undocumented name of a library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hf_gpipe"
LIBRARIES = (
    *("transformers", "torch", "accelerate", "peft", "bitsandbytes", "datasets", "tokenizers", "safetensors"),
    *("liger_kernel", "huggingface_hub"),
)
#: The modules of these libraries whose pages document what the package imports from them.
DOCUMENTED = {
    *LIBRARIES,
    *("bitsandbytes.optim", "safetensors.torch", "transformers.modeling_outputs"),
    *("torch.nn", "torch.nn.functional", "torch.nn.utils.rnn", "torch.nn.attention.bias", "torch.distributed"),
    *("torch.autograd.graph", "torch.backends.cuda", "torch.overrides", "torch.utils.checkpoint", "torch.utils.data"),
    *("torch.utils.hooks",),
}
#: Names that only look like parts of the libraries: of Python, and of Babel's data.
OF_OTHERS = {"_exit", "_current_frames", "_replace", "_asdict", "_make", "_fields", "_data"}


def own_names(trees: list[ast.Module]) -> set[str]:
    """The private names that the package itself defines or sets on `self`, or as another object's."""
    names = set(OF_OTHERS)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def touched(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a module touches of a library that is private or undocumented."""
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    roots[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                roots[alias.asname or alias.name] = name
                is_logging = name == "transformers.utils.logging"
                if (node.module not in DOCUMENTED and not is_logging) or "._" in name or alias.name in _MODULES:
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            is_of_library = text.split(".")[0] in roots and node.attr not in OF_OTHERS
            if is_of_library or node.attr not in own:
                yield text
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if name.startswith("_") and not name.startswith("__") and name not in own:
                yield ast.unparse(node)


#: Modules of transformers that it offers as if they were names of its interface.
_MODULES = ("masking_utils", "trainer_pt_utils", "cache_utils", "modeling_utils", "distributed_c10d")


def complaints(root: Path) -> list[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    others = {path: tree for path, tree in trees.items() if path.parent != root / "libraries"}
    own = own_names([*others.values()])
    return [f"{path.relative_to(root)}: {name}" for path, tree in others.items() for name in touched(tree, own)]


def test_private_names_are_in_libraries_alone() -> None:
    assert complaints(ROOT) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("from torch._subclasses import fake_tensor", "torch._subclasses.fake_tensor"),
        ("from transformers.masking_utils import ALL", "transformers.masking_utils.ALL"),
        ("from transformers import masking_utils", "transformers.masking_utils"),
        ("import torch\ntorch._foreach_norm([])", "torch._foreach_norm"),
        ("def f(model): return model.config._attn_implementation", "model.config._attn_implementation"),
        ("def f(model): return getattr(model, '_hf_hook', None)", "getattr(model, '_hf_hook', None)"),
        ("def f(tensor): return tensor._version", "tensor._version"),
        ("from torch import nn\nclass A:\n    def f(self, other): self._own = other._own", None),
        ("import os\nos._exit(0)", None),
    ],
)
def test_the_rule_itself(tmp_path: Path, line: str, complaint: str | None) -> None:
    (tmp_path / "module.py").write_text(line, encoding="utf-8")
    assert complaints(tmp_path) == ([] if complaint is None else [f"module.py: {complaint}"])
