"""Preferences: the token ids are TRL's, and what is wrong with a row is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_gpipe.data import PreferenceCollator, PreferenceExamples
from hf_gpipe.data.chats import preference_of
from hf_gpipe.data.rows import corpus_of_rows
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.reward import RewardExamples
from tests.data.chat_templates import MARKED, conversations, tokenizer, without_markers

ASKED = [{"role": "user", "content": "a"}]
GOOD, BAD = [{"role": "assistant", "content": "b"}], [{"role": "assistant", "content": "c d"}]


@pytest.fixture(scope="module")
def plain() -> Any:
    made = tokenizer()
    made.chat_template = without_markers(MARKED["qwen 3"])
    return made


def by_trl(rows: list[dict[str, Any]], made: Any, max_length: int) -> list[dict[str, list[int]]]:
    """What TRL's DPOTrainer makes of a dataset, by its own functions and without a model, cut as by its collator."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import DPOTrainer

    settings = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start")
    trainer = SimpleNamespace(_tokenizer=made)
    found = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), made, settings, "train")
    examples = []
    for row in found:
        left = max_length - len(row["prompt_ids"])
        answers = {name: row[name][:left] for name in ("chosen_ids", "rejected_ids")}
        examples.append({"prompt_ids": row["prompt_ids"], **answers})
    return examples


@pytest.mark.parametrize("form", ["messages", "messages without a prompt", "text", "text without a prompt"])
def test_the_ids_are_those_of_trl(form: str, plain: Any) -> None:
    pairs = [row["messages"][-3:-1] for row in conversations("mistral", 60) if len(row["messages"]) > 3]
    rows: list[dict[str, Any]] = []
    for number, (asked, answer) in enumerate(pairs[:20]):
        good, bad = answer["content"], pairs[number - 1][1]["content"] + "?"
        if form.startswith("text"):
            row: dict[str, Any] = {"prompt": f"{asked['content']} ", "chosen": good, "rejected": bad}
        else:
            row = {
                "prompt": [{"role": "user", "content": asked["content"]}],
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
            }
        if form.endswith("without a prompt"):
            prompt = row.pop("prompt")
            row = {name: prompt + answer for name, answer in row.items()}
        rows.append(row)
    max_length = 24 if form.startswith("text") else 60
    expected = by_trl(rows, plain, max_length)
    mine = PreferenceExamples(rows, plain, max_length=max_length)
    assert list(mine) == expected
    assert mine.num_dropped == len(rows) - len(expected)
    assert mine.num_truncated > 0
    longer = [max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in expected]
    assert mine.lengths == [len(row["prompt_ids"]) + more for row, more in zip(expected, longer, strict=True)]


@pytest.mark.parametrize("examples", [PreferenceExamples, RewardExamples])
def test_an_empty_answer_is_its_end_token(examples: Any) -> None:
    """As in TRL; it was an error. Without such a token nothing would be left of the answer."""
    made, rows = tokenizer(), [{"prompt": "", "chosen": "", "rejected": "b"}]
    if examples is PreferenceExamples:
        rows[0]["prompt"] = "a "
    assert examples(rows, made)[0]["chosen_ids"] == [made.eos_token_id]
    made.eos_token = None
    with pytest.raises(DataError, match="leave no tokens of an answer"):
        examples(rows, made)


def test_mini_batches_have_pairs_of_rows() -> None:
    rows = [
        {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
        {"prompt_ids": [6], "chosen_ids": [7], "rejected_ids": [8]},
    ]
    batch = PreferenceCollator(9)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [1, 2, 4, 5], [6, 7, 9, 9], [6, 8, 9, 9]]
    assert batch["labels"].tolist() == [
        [-100, -100, 3, -100],
        [-100, -100, 4, 5],
        [-100, 7, -100, -100],
        [-100, 8, -100, -100],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [3, 4, 2, 2]
    referenced = [{**row, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0} for row in rows]
    assert PreferenceCollator(9)(referenced)["ref_logps"].tolist() == [-1, -2, -1, -2]
    foreign = [
        {"of": "a file", **dict(reversed(row.items()))} for row in rows
    ]  # in another order, with a column of text
    assert PreferenceCollator(9)(foreign)["input_ids"].tolist() == batch["input_ids"].tolist()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "x: 'rejected' is not there; a row of preferences has 'chosen' and"),
        ({"prompt": "a", "chosen": GOOD, "rejected": BAD}, "'prompt' is text, 'chosen' is not, 'rejected' is not"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": [{"role": "x"}]}, "x: rejected[0].role is 'x'"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": []}, "x: rejected is []; it must be a list of messages"),
        ({"chosen": "ab", "rejected": "b"}, "x: there is no prompt, or it is empty"),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": BAD, "tools": "["}, "tools is text that is not JSON"),
    ],
)
def test_what_is_no_row_of_preferences(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        preference_of("x", row)
    assert message in str(caught.value)


def test_examples_that_cannot_be_made(plain: Any) -> None:
    row = {"prompt": "abc", "chosen": "d", "rejected": "e"}
    with pytest.raises(
        DataError, match="of 1 rows none is left in 2 tokens: 1 were dropped because their prompt is as long"
    ):
        PreferenceExamples([row], plain, max_length=2)
    made = tokenizer()
    with pytest.raises(DataError, match="has no chat template"):
        PreferenceExamples([{"prompt": ASKED, "chosen": GOOD, "rejected": BAD}], made)
    made.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match="row 0: the chat template refuses the conversation: no"):
        PreferenceExamples([{"prompt": ASKED, "chosen": GOOD, "rejected": BAD}], made)


def test_files_are_read_and_errors_name_file_line_and_column(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(30)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    corpus = corpus_of_rows(DataSection(kind="preferences", path=str(path)), preference_of, "preferences")
    assert sorted(one.text for part in (corpus.train, corpus.validation, corpus.test) for one in part) == sorted(
        json.dumps(row) for row in rows
    )
    assert set(corpus.texts()) >= {"yes", "no"}
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: 'rejected' is not there"):
        corpus_of_rows(DataSection(kind="preferences", path=str(path)), preference_of, "preferences")
