"""What tests share."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.emulated_cuda.__main__ import environment as with_devices

#: Of all files those whose tests take longest. They run first, so that none of them is left at the end for one process.
#: Some wait more than they compute: each of these is followed by others that compute.
LONGEST = (
    *("test_faults.py", "test_costs.py", "test_freezing.py", "test_launch.py", "test_recipes.py"),
    *("test_sequence_chunks.py", "test_benches.py", "test_train.py", "test_start.py", "test_tensor_parallel.py"),
    *("test_visiting_weights.py", "test_gpu_check.py", "test_state.py", "test_execution.py", "test_grpo.py"),
    *("test_zero.py", "test_malformed.py", "test_image_families.py", "test_merge.py", "test_generation.py"),
    *("test_random_search.py", "test_replicas.py", "test_examples.py", "test_image_text.py", "test_foreign_scripts.py"),
    *("test_peft_beyond_blocks.py", "test_vocabulary_parallel.py", "test_pipeline.py", "test_replicated_runs.py"),
    *("test_training_to_end.py", "test_trainer.py"),
)
#: Files that run in one process, because the first of them observes, compares or traces models for the others.
TOGETHER = (
    ("tests/adapters/", "tests/test_freezing.py"),
    *(("tests/checkpoint/",), ("tests/planner/",), ("tests/trainers/",)),
)

# Before anything reads it: no test asks a hub, and a model that is not there is told at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Some models take the softmax of attention in float32, even where the rest is float64. With vectors of 8 numbers
# (AVX2) a row whose padding was cut off is then added up in another order: 1e-8 of the gradient norm.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "default")
# On a CPU with AMX, torch 2.13 has no attention in bfloat16 without AVX-512, and products in float16 are rounded
# otherwise for other shapes.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# How long examples take to draw says how busy the machine is, and nothing of the code.
# The tests of tests/gpu run without hypothesis too.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
# What tests prepare is not for the cache of whoever runs them; their commands inherit this one.
_CACHES = os.environ.get("HF_GPIPE_TEST_CACHES")
_CACHE = os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="hf_gpipe-cache-", dir=_CACHES)
if _CACHES is None:  # the first process removes those of all that it starts, which may be killed
    os.environ["HF_GPIPE_TEST_CACHES"] = _CACHE
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        config.add_cleanup(fork_server.offer(fork_server.EMULATED, with_devices(os.environ)))
        if sys.version_info < (3, 14):  # from then on a process must prove to a fork server that it has started it
            config.add_cleanup(fork_server.offer(fork_server.PLAIN, os.environ))


def pytest_collection() -> None:
    """Spare the garbage collector what the tests import, which is no garbage to the end: see the next function."""
    gc.disable()


def pytest_collection_finish() -> None:
    spare_what_is_there()
    # Models and traces of tests make many objects, few of them garbage: it is looked for more seldom.
    gc.set_threshold(50_000, 20, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, what the libraries have imported and kept since is no garbage either."""
    if nextitem is None or nextitem.path != item.path:
        spare_what_is_there()


def spare_what_is_there() -> None:
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers, where that is possible. Until then the tests are compiled, which else each worker does."""
    if fork_server.PLAIN in os.environ:
        for spec in specs:
            spec.python = f"{sys.executable} {Path(__file__).with_name('forked_worker.py')}"
        if not sys.dont_write_bytecode:
            compile_tests(config.pluginmanager.rewrite_hook)


def compile_tests(loader: Any) -> None:
    """Let pytest's loader compile the tests of this folder, and write what it has compiled."""
    for path in Path(__file__).parent.rglob("test_*.py"):
        spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        vars(module)["__builtins__"] = {}  # the module's code ends at its first import
        with suppress(ImportError):
            loader.exec_module(module)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process of `pytest -n` whole files, whose tests share what they have prepared; see `TOGETHER` too."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((str(shared) for shared in TOGETHER if file.startswith(shared)), file)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture
def undo_the_command_s_settings() -> Iterator[None]:
    """The command silences other packages for good, which a process of its own may do."""
    environment, logger, filters = dict(os.environ), logging.getLogger("hf_gpipe"), list(warnings.filters)
    handlers = logger.handlers
    yield
    os.environ.clear()
    os.environ.update(environment)
    logger.handlers, logger.propagate = handlers, True
    warnings.filters[:] = filters


@pytest.fixture(scope="module")
def no_prediction() -> Iterator[None]:
    """Leave out what a run does at its end and what takes longer than all else of a tiny one; see `leave_out`."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch)
        yield


def leave_out(patch: pytest.MonkeyPatch) -> None:
    """Let runs say nothing of the planner's prediction, measure one step in place of five, and draw no timeline.

    tests/from_recipe/test_cost.py, test_timeline.py and tests/schedule/test_draw.py have their tests, and the command
    that tests start as a user does has all of it.
    """
    from hf_gpipe.from_recipe import cost, job

    patch.setattr(cost, "_predicted", lambda pipe, batches: {})
    patch.setattr(job, "measure_step", partial(job.measure_step, repeats=1))
    patch.setattr(job, "draw_png", lambda *timelines, titles: None)
