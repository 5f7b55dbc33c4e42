"""Imports run one way: a module may import from its own package and from the layers above it in LAYERS."""

from __future__ import annotations

import ast
import gc
import importlib
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import hf_gpipe

PACKAGE = "hf_gpipe"
ROOT = Path(__file__).parents[1] / PACKAGE

# Top to bottom, as in docs/architecture.md. Those of one line do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("text",),
    ("strict_json",),
    ("registry",),
    ("sources",),
    ("progress",),
    ("libraries",),
    ("job",),
    ("schedule",),
    ("partition",),
    ("settings",),
    ("adapters",),
    ("losses",),
    ("runtime",),
    ("checkpoint",),
    ("model",),
    ("planner",),
    ("pipeline",),
    ("recipe",),
    ("data",),
    ("training",),
    ("modes",),
    ("trainers",),
    ("from_recipe",),
    ("tasks",),
    ("commands",),
    ("train",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
WITHOUT_TORCH = ("errors", "text", "schedule", "partition", "settings", "recipe", "strict_json", "sources", "progress")
HEAVY = {"torch", "transformers"}


def modules(root: Path) -> dict[str, Path]:
    """The file of every module below the package folder `root`, by the module's name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path) -> list[str]:
    """The imports of a module, at any depth and for type checkers too, as "package.module" or "package.module.name"."""
    found = []
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def own_imports(root: Path) -> dict[str, set[str]]:
    """For every module the modules of the package that it imports."""
    known = modules(root)
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        inside = [found for found in imports(name, path) if found.split(".")[0] == root.name]
        graph[name] = {found if found in known else found.rpartition(".")[0] or found for found in inside}
    return graph


@cache
def of_the_package() -> dict[str, set[str]]:
    return own_imports(ROOT)


def layer(module: str) -> str:
    """The folder or file right below the package that a module belongs to."""
    return module.split(".")[1]


def wrong_way(graph: dict[str, set[str]]) -> list[str]:
    """What the order of the layers forbids, one line each. The package's own names are for users, not for modules."""
    complaints = []
    for module, imported in graph.items():
        if "." not in module:
            continue
        if layer(module) not in RANK:
            complaints.append(f"{module} has no place in LAYERS")
            continue
        for other in sorted(imported):
            if "." not in other:
                complaints.append(f"{module} imports from {other} itself")
            elif layer(other) != layer(module) and RANK.get(layer(other), len(LAYERS)) >= RANK[layer(module)]:
                complaints.append(f"{module} imports {other}, which stands below or beside it")
    return complaints


def folded(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph, in which the modules of a folder inside of a package are one."""
    parts = (module.split(".") for module in graph if module.count(".") > 2)
    folders = {".".join(names[:3]) for names in parts}

    def node(module: str) -> str:
        folder = ".".join(module.split(".")[:3])
        return folder if folder in folders else module

    result: dict[str, set[str]] = {}
    for module, imported in graph.items():
        result.setdefault(node(module), set()).update(map(node, imported))
    return {module: imported - {module} for module, imported in result.items()}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or none. A module that runs as a program may import itself."""
    sorter = TopologicalSorter({module: imported - {module} for module, imported in graph.items() if "." in module})
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_has_its_place_and_imports_run_upwards_only() -> None:
    assert wrong_way(of_the_package()) == []


SCRIPTS = sorted(path for path in (ROOT.parent / "scripts").iterdir() if list(path.glob("*.py")))


@pytest.mark.parametrize("root", [ROOT, ROOT.parent / "tests", *SCRIPTS], ids=lambda root: root.name)
def test_no_modules_import_each_other_in_a_circle(root: Path) -> None:
    """Inside a package neither, nor for the type checker alone."""
    assert cycle(of_the_package() if root == ROOT else own_imports(root)) == []


def test_no_folders_inside_of_a_package_import_each_other_in_a_circle() -> None:
    """Nor a folder and the modules beside it."""
    assert cycle(folded(of_the_package())) == []


def test_what_stages_are_compared_with_shares_no_code_with_them() -> None:
    """The plain step was cut by the runtime's own function, so a mistake in that was on both sides."""
    engine = {"job", "schedule", "partition", "runtime", "pipeline", "modes"}
    assert not {module for module in of_the_package()["hf_gpipe.model.reference"] if module.split(".")[1] in engine}


def test_the_upper_layers_name_neither_torch_nor_transformers() -> None:
    for name, path in modules(ROOT).items():
        if "." in name and layer(name) in WITHOUT_TORCH:
            assert not HEAVY & {found.split(".")[0] for found in imports(name, path)}, name


def test_the_upper_layers_load_neither_torch_nor_transformers_and_the_launcher_no_transformers() -> None:
    """A process that only starts others would otherwise spend seconds on importing it."""
    upper = ", ".join(f"{PACKAGE}.{name}" for name in WITHOUT_TORCH)
    launcher = f"{PACKAGE}.train, {PACKAGE}.job.launch"
    loaded = f"print(sorted({HEAVY!r} & set(sys.modules)))"
    finished = subprocess.run(
        [sys.executable, "-c", f"import sys, {upper}; {loaded}; import {launcher}; {loaded}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    assert finished.stdout.splitlines() == ["[]", "['torch']"]


def test_a_pipeline_loads_no_library_that_it_may_not_need() -> None:
    """Each process of a pipeline would hold its pages: peft and bitsandbytes take 60 MB."""
    optional = {
        "peft",
        "bitsandbytes",
        "datasets",
        "pandas",
        "pyarrow",
        "sacrebleu",
        "matplotlib",
        "transformers.trainer",
    }
    code = f"import sys; from hf_gpipe import Pipeline; print(sorted({optional!r} & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert finished.stdout.splitlines() == ["[]"]


def test_public_names_load_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which runs again afterwards."""
    enabled = []

    def importing(name: str) -> ModuleType:
        enabled.append(gc.isenabled())
        return importlib.import_module(name)

    monkeypatch.setattr(hf_gpipe, "importlib", SimpleNamespace(import_module=importing))
    for name in hf_gpipe.__all__:
        if name != "__version__":
            monkeypatch.delitem(vars(hf_gpipe), name, raising=False)
        assert getattr(hf_gpipe, name) is not None
    assert set(enabled) == {False}
    assert gc.isenabled()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Pipelin"):
        hf_gpipe.Pipelin  # noqa: B018


@pytest.mark.parametrize(
    ("importer", "statement", "complaint"),
    [
        ("schedule/table.py", "from pack.runtime import stage", "pack.schedule.table imports pack.runtime.stage"),
        ("schedule/table.py", "from ..runtime.stage import F", "pack.schedule.table imports pack.runtime.stage"),
        (
            "schedule/table.py",
            "def f():\n    import pack.runtime.stage",
            "pack.schedule.table imports pack.runtime.stage",
        ),
        (
            "strict_json.py",
            "from pack import train",
            "pack.strict_json imports pack.train, which stands below or beside it",
        ),
        ("runtime/stage.py", "from pack import Pipeline", "pack.runtime.stage imports from pack itself"),
        ("runtime/stage.py", "from pack.schedule.table import Schedule", None),
        ("runtime/stage.py", "from .edge import Edge\nimport os.path", None),
    ],
)
def test_the_rule_itself(tmp_path: Path, importer: str, statement: str, complaint: str | None) -> None:
    root = tmp_path / "pack"
    for name in ("schedule/table.py", "runtime/stage.py", "runtime/edge.py", "strict_json.py", "train.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
        (root / name).with_name("__init__.py").touch()
    (root / importer).write_text(statement, encoding="utf-8")
    complaints = wrong_way(own_imports(root))
    assert complaints == [] if complaint is None else complaint in complaints[0]


def test_a_module_without_a_place_is_named() -> None:
    assert wrong_way({"p.odd": set(), "p.strict_json": {"p.errors"}}) == ["p.odd has no place in LAYERS"]


def test_a_cycle_for_types_inside_a_package_is_found(tmp_path: Path) -> None:
    """The table imported its validation, which imported the table for its annotations."""
    root = tmp_path / "pack"
    (root / "schedule").mkdir(parents=True)
    (root / "schedule" / "table.py").write_text("from pack.schedule.validate import check")
    assert cycle(own_imports(root)) == []
    (root / "schedule" / "validate.py").write_text("if TYPE_CHECKING:\n    from pack.schedule.table import Schedule")
    assert set(cycle(own_imports(root))) == {"pack.schedule.table", "pack.schedule.validate"}


def test_a_cycle_of_a_folder_is_found() -> None:
    graph = {"p.a.costs.sums": {"p.a.machines.links"}, "p.a.machines.links": set(), "p.a.plan": {"p.a.costs.sums"}}
    assert cycle(folded(graph)) == []
    assert set(cycle(folded(graph | {"p.a.machines.speeds": {"p.a.plan"}}))) == {
        "p.a.costs",
        "p.a.machines",
        "p.a.plan",
    }


def test_a_cycle_is_found() -> None:
    assert set(cycle({"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.a"}})) == {"p.a", "p.b", "p.c"}
    assert cycle({"p.a": {"p.b"}, "p.b": set()}) == []
