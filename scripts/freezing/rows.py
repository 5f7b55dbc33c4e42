"""Token ids, labels and other entries of a thousand drawn rows for each kind of data, and the order of mini-batches.

The data are made here from a seed, and the tokenizer from a list, so nothing is trained and nothing downloaded.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerFast

from examples import digit_questions
from hf_gpipe import PipelineTrainer
from hf_gpipe import PipelineTrainingArguments as Arguments
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.recipe import parse_recipe
from scripts.freezing.results import Entries, Tolerance
from scripts.freezing.toys import Rows, config_of, model_of, text_of, tokenizer

FILE = "rows.txt.xz"
DRAWN, WRITTEN = 1000, 1300

_MARIAN = "model: {{config: {{model_type: marian, d_model: 16, encoder_layers: 1, decoder_layers: 1}}}}"
_LLAMA = (
    "model: {{config: {{model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2}}}}"
)
_BERT = (
    "model: {{config: {{model_type: bert, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, "
    "num_attention_heads: 2}}}}"
)
_CHATML = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)


def names() -> list[str]:
    """The kinds of data with their options, and the ways to draw mini-batches."""
    return [*_KINDS, *_ORDERS]


def entries(wanted: Sequence[str]) -> Entries:
    """The rows of each."""
    found: Entries = {}
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-freeze-") as name:
        folder = Path(name)
        _write_tokenizer(folder / "tokenizer")
        with _caches(folder):
            for one in wanted:
                try:
                    found[one] = _order(_ORDERS[one], folder) if one in _ORDERS else _rows(one, folder)
                except UserError as error:
                    found[one] = f"{type(error).__name__}: {str(error).replace(name, 'FOLDER')}"
    return found


def tolerance_of(name: str) -> Tolerance:
    """Sums of pixels may be added up in another order; ids are whole numbers, which are exact."""
    return Tolerance(1e-6)


@contextmanager
def _caches(folder: Path) -> Iterator[None]:
    """A cache of corpora and data sets that is not the user's."""
    with tempfile.TemporaryDirectory() as cache:
        import datasets

        before = datasets.config.HF_DATASETS_CACHE
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = before


def _write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    made = tokenizer()
    made.chat_template = _CHATML
    made.add_tokens(["<2de>", "<2fr>", "<2ko>", "<2en>"], special_tokens=True)
    made.save_pretrained(folder)
    return made


def _rows(name: str, folder: Path) -> str:
    write, model, section = _KINDS[name]
    own = folder / name.replace(" ", "-").replace(",", "")
    own.mkdir()
    write(own)
    text = (
        f"{model.format(folder=own)}\ndata: {{{section.format(folder=own)}}}\n"
        f"training: {{output_dir: out, max_steps: 1, batch_size: 4{', length_bucketing: false' * (name == 'kto')}}}\n"
        "pipeline: {num_stages: 1, num_micro_batches: 1}\n"
    )
    is_of_images = "image" in name
    if not is_of_images:
        text += f"tokenizer: {{path: {folder / 'tokenizer'}}}\n"
    recipe = parse_recipe(text)
    task = task_of(recipe)
    corpus = task.corpus(recipe)
    rows = task.rows(recipe, corpus.train, task.processor(recipe, corpus))
    if hasattr(rows, "__len__"):
        dice = random.Random(f"rows of {name}")
        drawn = [(index, rows[index]) for index in (dice.randrange(len(rows)) for _ in range(DRAWN))]
        head = f"{len(rows)} rows of training"
    else:
        drawn, head = list(enumerate(islice(iter(rows), DRAWN))), "a stream"
    return "\n".join([head, *(f"{index}: {_shown(row)}" for index, row in drawn)])


def _shown(row: Mapping[str, Any]) -> str:
    return " | ".join(f"{key} {_values(value)}" for key, value in sorted(row.items()))


def _values(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size > 8:
        weights = np.arange(1, value.size + 1, dtype=np.float64) / value.size
        return f"{value.shape} {float((value.astype(np.float64).ravel() * weights).sum()):.9g}"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and value and isinstance(value[0], list):
        return " / ".join(map(_values, value))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---------------------------------------------------------------------- the order of mini-batches

_ORDERS: dict[str, dict[str, Any]] = {
    "order random": {"train_sampling_strategy": "random"},
    "order sequential": {"train_sampling_strategy": "sequential"},
    "order by length": {"train_sampling_strategy": "group_by_length"},
    "order by tokens": {"batch_tokens": 60, "train_sampling_strategy": "group_by_length"},
    "order of another seed": {"train_sampling_strategy": "random", "seed": 9, "data_seed": 4},
    "order without the last": {"train_sampling_strategy": "random", "dataloader_drop_last": True},
}


def _order(options: Mapping[str, Any], folder: Path) -> str:
    """The first tokens of each row of the mini-batches of two epochs."""
    values = {"num_stages": 1, "num_micro_batches": 1, "per_device_train_batch_size": 8, "max_steps": 1, "seed": 3}
    values |= {"use_cpu": True, "report_to": "none", "schedule": "gpipe", "recompute": "none", "partition": "count"}
    args = Arguments(output_dir=str(folder / "order"), **{**values, **options})
    made = PipelineTrainer(model_of(config_of("llama")), args, PairCollator(pad_token_id=0), Rows(150))
    batches = made.train_batches()
    return "\n".join(
        f"epoch {epoch}: {' / '.join(' '.join(map(str, row[:3])) for row in batch['input_ids'].tolist())}"
        for epoch in (0, 1)
        for batch in batches.epoch(epoch)
    )


# ---------------------------------------------------------------------- the data


def _lines(make: Callable[[random.Random, int], dict[str, Any]]) -> Callable[[Path], None]:
    """A function that writes rows as JSON lines."""

    def write(folder: Path) -> None:
        dice = random.Random(11)
        text = "".join(f"{json.dumps(make(dice, number), ensure_ascii=False)}\n" for number in range(WRITTEN))
        (folder / "rows.jsonl").write_text(text, encoding="utf-8")

    return write


def _pair(dice: random.Random, number: int) -> dict[str, Any]:
    languages = ("de", "fr", "ko")
    return {"source": text_of(dice, 30), "target": f"Grüße {text_of(dice, 20)}", "lang": languages[number % 5 % 3]}


def _conversation(dice: random.Random, number: int) -> dict[str, Any]:
    turns = [{"role": "system", "content": text_of(dice)}] if number % 4 == 0 else []
    for _ in range(dice.randrange(1, 4)):
        turns += [{"role": "user", "content": text_of(dice, 20)}, {"role": "assistant", "content": text_of(dice, 25)}]
    return {"messages": turns}


def _completion(dice: random.Random, number: int) -> dict[str, Any]:
    return {"prompt": f"{text_of(dice, 20)}:", "completion": f" {text_of(dice, 20)}"}


def _preference(dice: random.Random, number: int) -> dict[str, Any]:
    if number % 3:
        return {"prompt": f"{text_of(dice, 15)}:", "chosen": text_of(dice, 20), "rejected": text_of(dice, 20)}
    asked = [{"role": "user", "content": text_of(dice, 15)}]
    answers = [[{"role": "assistant", "content": text_of(dice, 20)}] for _ in range(2)]
    return {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}


def _judged(dice: random.Random, number: int) -> dict[str, Any]:
    return {**_completion(dice, number), "label": dice.random() < 0.6}


def _labelled(dice: random.Random, number: int) -> dict[str, Any]:
    return {"text": text_of(dice, 40), "label": ("negative", "positive", "neutral")[dice.randrange(3)]}


def _texts(dice: random.Random, number: int) -> dict[str, Any]:
    return {"anchor": text_of(dice, 20), "positive": text_of(dice, 20), "negative": text_of(dice, 20)}


def _scored(dice: random.Random, number: int) -> dict[str, Any]:
    return {"sentence1": text_of(dice, 20), "sentence2": text_of(dice, 20), "score": round(dice.random(), 3)}


def _prompt(dice: random.Random, number: int) -> dict[str, Any]:
    return {"prompt": text_of(dice, 20), "answer": text_of(dice, 10)}


def _document(dice: random.Random, number: int) -> dict[str, Any]:
    return {"text": text_of(dice, 200)}


def _csv(folder: Path) -> None:
    dice = random.Random(11)
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["source", "target", "lang"])
        writer.writeheader()
        writer.writerows(_pair(dice, number) for number in range(WRITTEN))


def _parquet(folder: Path) -> None:
    dice = random.Random(11)
    rows = [_pair(dice, number) for number in range(WRITTEN)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")


def _parallel(folder: Path) -> None:
    dice = random.Random(11)
    rows = [_pair(dice, number) for number in range(WRITTEN)]
    for side in ("source", "target"):
        (folder / f"{side}.txt").write_text("".join(f"{row[side]}\n" for row in rows), encoding="utf-8")


def _hub(folder: Path) -> None:
    """A directory in the form of a data set of a hub: a folder for each subset."""
    dice, head = random.Random(11), ["---", "configs:"]
    for name, (first, second) in {"de-en": ("de", "en"), "en-fr": ("en", "fr")}.items():
        (folder / name).mkdir()
        for split, count in {"train": WRITTEN // 2, "validation": 20, "test": 20}.items():
            rows = [{"translation": {first: text_of(dice, 25), second: text_of(dice, 25)}} for _ in range(count)]
            path = folder / name / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        head += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "validation", "test"):
            head += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))


def _images(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 17, (WRITTEN // 4, 8, 8))
    rows = [{"image": digit_questions.bytes_of(one), "label": number % 3} for number, one in enumerate(pixels)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")


def _questions(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 17, (WRITTEN // 4, 8, 8))
    digit_questions.write_rows(folder / "data", pixels, [number % 10 for number in range(len(pixels))])
    torch.manual_seed(0)
    digit_questions.write_model(folder / "model")


def _nothing(folder: Path) -> None:
    """The corpus is generated."""


_HELD_OUT = "validation_fraction: 0.02, test_fraction: 0.02"
_FILE = f"path: '{{folder}}/rows.jsonl', {_HELD_OUT}"
_PAIRS = f"language_field: lang, {_HELD_OUT}, max_source_tokens: 24, max_target_tokens: 24"
#: (what writes the data, the model, the section `data`) of each kind with its options.
_KINDS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cldr": (
        *(_nothing, _MARIAN),
        f"kind: cldr, languages: [de, fr], examples_per_language: 700, max_number: 99, {_HELD_OUT}",
    ),
    "cldr with tags": (
        *(_nothing, _MARIAN),
        "kind: cldr, languages: [de, fr, ko], direction: both, examples_per_language: 500, power_law_exponent: 0.5, "
        f"templates: [date_long, price], target_tag: true, {_HELD_OUT}",
    ),
    "jsonl": (_lines(_pair), _MARIAN, f"kind: jsonl, path: '{{folder}}/rows.jsonl', {_PAIRS}"),
    "jsonl of a decoder": (_lines(_pair), _LLAMA, f"kind: jsonl, path: '{{folder}}/rows.jsonl', {_PAIRS}"),
    "csv": (_csv, _MARIAN, f"kind: csv, path: '{{folder}}/rows.csv', {_PAIRS}, languages: [de, ko]"),
    "parquet": (_parquet, _MARIAN, f"kind: parquet, path: '{{folder}}/rows.parquet', {_PAIRS}, temperature: 3"),
    "parallel": (
        *(_parallel, _MARIAN),
        f"kind: parallel, path: '{{folder}}/source.txt', target_path: '{{folder}}/target.txt', {_HELD_OUT}",
    ),
    "hub": (
        *(_hub, _MARIAN),
        "kind: hub, path: '{folder}', subset: ['{{language}}-en', 'en-{{language}}'], languages: [de, fr], "
        "source_field: 'translation.{{language}}', target_field: translation.en, direction: both",
    ),
    "hub streamed": (
        *(_hub, _MARIAN),
        "kind: hub, path: '{folder}', subset: ['{{language}}-en', 'en-{{language}}'], languages: [de, fr], "
        "source_field: 'translation.{{language}}', target_field: translation.en, direction: to_english, "
        "streaming: true, shuffle_buffer: 64, temperature: 2",
    ),
    "text": (_lines(_document), _LLAMA, f"kind: text, {_FILE}, max_target_tokens: 32"),
    "chat": (_lines(_conversation), _LLAMA, f"kind: chat, {_FILE}, max_length: 48"),
    "chat from its end": (
        *(_lines(_conversation), _LLAMA),
        f"kind: chat, {_FILE}, max_length: 30, truncation_mode: keep_end, assistant_only_loss: false",
    ),
    "chat of completions": (_lines(_completion), _LLAMA, f"kind: chat, {_FILE}, max_length: 48"),
    "preferences": (_lines(_preference), _LLAMA, f"kind: preferences, {_FILE}, max_length: 40"),
    "kto": (_lines(_judged), _LLAMA, f"kind: kto, {_FILE}, max_length: 40"),
    "rewards": (_lines(_preference), _LLAMA, f"kind: rewards, {_FILE}, max_length: 60"),
    "prompts": (_lines(_prompt), _LLAMA, f"kind: prompts, {_FILE}, max_length: 40"),
    "classification": (
        *(_lines(_labelled), _LLAMA),
        f"kind: classification, {_FILE}, labels: [negative, positive, neutral], max_length: 30",
    ),
    "embeddings": (
        _lines(_texts),
        f"{_BERT}\nembeddings: {{{{texts: 3}}}}",
        f"kind: embeddings, {_FILE}, max_length: 20",
    ),
    "embeddings with scores": (
        *(_lines(_scored), f"{_BERT}\nembeddings: {{{{loss_type: cosine}}}}"),
        f"kind: embeddings, {_FILE}, max_length: 20",
    ),
    "images": (
        _images,
        "model: {{config: {{model_type: vit, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
        "intermediate_size: 16, image_size: 8, patch_size: 4, num_channels: 1}}}}",
        f"kind: images, path: '{{folder}}/rows.parquet', labels: [a, b, c], {_HELD_OUT}",
    ),
    "image_text": (
        _questions,
        "model: {{path: '{folder}/model'}}",
        f"kind: image_text, path: '{{folder}}/data', max_length: 64, {_HELD_OUT}",
    ),
}
