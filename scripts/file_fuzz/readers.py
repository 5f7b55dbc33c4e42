"""Every format that is read: a good sample of it, how it is damaged, and the product's own code that reads it."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow.parquet

from hf_gpipe.checkpoint import digests
from hf_gpipe.commands.train import _num_workers, main
from hf_gpipe.data import TokenizedPairs, formats
from hf_gpipe.data.tokenizer import trained_tokenizer
from hf_gpipe.errors import EXIT_USER_ERROR, UserError
from hf_gpipe.from_recipe import cost, job
from hf_gpipe.recipe import DataSection, TokenizerSection, load_recipe
from hf_gpipe.schedule import build, read_table
from hf_gpipe.tasks.translation.corpus import build_corpus
from scripts import tiny_run
from scripts.file_fuzz import mutate

Mutate = Callable[[bytes, random.Random], bytes]

_OF_NAME: tuple[tuple[str, Mutate], ...] = (
    (".jsonl.gz", mutate.of_gzip(mutate.of_lines)),
    (".gz", mutate.of_gzip(mutate.in_bytes)),
    (".jsonl", mutate.of_lines),
    (".json", mutate.of_json),
    (".safetensors", mutate.of_safetensors),
    (".yaml", mutate.of_yaml),
    ("table.txt", mutate.of_table),
    ("", mutate.in_bytes),
)


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        sample: the folder in the prepared one with its files.
        damage: changes some of the files in a copy of that folder.
        read: reads the copy, with the prepared folder beside it. Raises UserError for what is damaged.
    """

    sample: str
    damage: Callable[[Path, random.Random], None]
    read: Callable[[Path, Path], None]


class WrongError(Exception):
    """Damage that nobody noticed, or a command that ended in another way than by one line."""


def prepare(folder: Path) -> None:
    """Make a sample of every format. It runs a training."""
    given = folder / "given"
    given.mkdir()
    recipe = tiny_run.prepare(given)
    _command(recipe, folder / "checkpoint", "training.max_steps=4", "training.eval_steps=100")
    shutil.copytree(folder / "checkpoint" / "checkpoint-4", folder / "model")
    for name in ("recipe", "table", "data"):
        (folder / name).mkdir()
    shutil.copy(recipe, folder / "recipe" / "recipe.yaml")
    (folder / "table" / "table.txt").write_text(build("1f1b", 3, 4).text())
    rows = [json.loads(line) for line in (given / "pairs.jsonl").read_text().splitlines()[:20]]
    data = folder / "data"
    shutil.copy(given / "pairs.jsonl", data / "x.jsonl")
    (data / "x.json").write_text(json.dumps(rows))
    (data / "x.csv").write_text("source,target\n" + "".join(f"{row['source']},{row['target']}\n" for row in rows))
    (data / "x.txt").write_text("\n".join(row["source"] for row in rows))
    for name in ("x.jsonl", "x.json", "x.csv", "x.txt"):
        (data / f"{name}.gz").write_bytes(gzip.compress((data / name).read_bytes(), mtime=0))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data / "x.parquet", row_group_size=7)
    (folder / "cache").mkdir()
    _cached(folder / "cache", folder)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _damage_one(folder: Path, choose: random.Random) -> None:
    file = choose.choice(_files(folder))
    change = next(change for ending, change in _OF_NAME if file.name.endswith(ending))
    file.write_bytes(change(file.read_bytes(), choose))


def _damage_model(folder: Path, choose: random.Random) -> None:
    """One file, and in most cases its digest too, as somebody does who changes it on purpose."""
    newest = folder / "checkpoint-4" if (folder / "checkpoint-4").exists() else folder
    file = choose.choice(_files(newest))
    name, is_of_tensors = file.relative_to(newest).as_posix(), file.suffix == ".safetensors"
    if file.name == digests.DIGESTS_FILE:
        _, _, rest = file.read_bytes().partition(b"\n")
        changed = mutate.of_json(b"{" + rest, choose)
        file.write_bytes(digests._first_line(changed[1:]) + changed[1:] if choose.random() < 0.8 else changed)
        return
    change = next(change for ending, change in _OF_NAME if file.name.endswith(ending))
    # The values of tensors are anybody's; what is fuzzed is how they are read.
    changed = change(file.read_bytes(), choose)
    if choose.random() < 0.2:
        file.write_bytes(changed)
        return
    known = digests.Digests.read(newest)
    file.write_bytes(changed)
    written: dict[str, digests.Entry] = {}
    if is_of_tensors and known is not None:
        entry = known.files[name]
        assert isinstance(entry, dict)
        written[name] = {**entry, "header": digests.digest(digests.read_header(file))}
    digests.write(newest, written, None if known is None else known.step)
    if choose.random() < 0.1:
        (newest / digests.DIGESTS_FILE).unlink()


def _command(recipe: Path, output: Path, *words: str) -> None:
    """Train in this process. Raises WrongError unless it ends well, or by a message and code 2."""
    datasets.config.HF_DATASETS_CACHE = Path(tempfile.gettempdir())
    # At its end a run says what was predicted and draws a picture, which reads no file.
    cost._predicted = lambda pipe, batches: {}
    job.draw_png = lambda *timelines, titles: None
    code = main(
        [str(recipe), f"training.output_dir={output}", "pipeline.num_processes=1", "evaluation.max_examples=1", *words]
    )
    if code == EXIT_USER_ERROR:
        raise UserError("see above")
    if code:
        raise WrongError(f"exit code {code}")


def _resume(folder: Path, prepared: Path) -> None:
    _command(prepared / "given" / "recipe.yaml", folder, "training.max_steps=5", "training.eval_steps=100")


def _start(folder: Path, prepared: Path) -> None:
    words = ("model.config={}", f"model.path={folder}", f"tokenizer.path={folder}", "training.max_steps=1")
    _command(prepared / "given" / "recipe.yaml", folder / "out", *words)


def _recipe(folder: Path, prepared: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    num_processes = _num_workers(recipe)
    recipe.table(num_processes)
    size = recipe.training.size
    recipe.pipeline.check_micro_batches(size.accumulation, size.known_rows)


def _table(folder: Path, prepared: Path) -> None:
    read_table(str(folder / "table.txt"), 3, 4, 3)


def _data(folder: Path, prepared: Path) -> None:
    """All of them: the one that is damaged raises an error."""
    for file in _files(folder):
        name = file.name.removesuffix(".gz")
        read = {
            ".jsonl": formats.read_jsonl,
            ".json": formats.read_json,
            ".csv": formats.read_csv,
            ".txt": formats.numbered_lines,
            ".parquet": formats.read_parquet,
        }[Path(name).suffix]
        for _ in read(file):
            pass


def _cached(folder: Path, prepared: Path) -> tuple[list[object], str, list[object]]:
    """Pairs, tokenizer and tokens, from a cache."""
    datasets.config.HF_DATASETS_CACHE = folder
    data = DataSection(kind="jsonl", path=str(prepared / "given" / "pairs.jsonl"))
    corpus = build_corpus(data)
    tokenizer = trained_tokenizer(corpus, TokenizerSection(vocab_size=290))
    text = tokenizer.backend_tokenizer.to_str()
    rows = TokenizedPairs(corpus.train, tokenizer, max_source_tokens=30, max_target_tokens=30)
    return list(corpus.train), text, [rows[index] for index in range(len(rows))]


def _cache(folder: Path, prepared: Path) -> None:
    # The good one is read in the same process: a hundredth of a second.
    whole = shutil.copytree(prepared / "cache", folder / "whole")
    expected = _cached(Path(whole), prepared)
    if _cached(folder, prepared) != expected:
        raise WrongError("damaged data of the cache were used")


FORMATS = {
    "checkpoint": Format("checkpoint", _damage_model, _resume),
    "model": Format("model", _damage_model, _start),
    "recipe": Format("recipe", _damage_one, _recipe),
    "table": Format("table", _damage_one, _table),
    "cache": Format("cache", _damage_one, _cache),
    "data": Format("data", _damage_one, _data),
}
"""By the name that `--formats` takes."""

if sys.platform != "linux":
    raise SystemExit("the processes are watched as Linux allows; run this on Linux")
