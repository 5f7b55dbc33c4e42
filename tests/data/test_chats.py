"""Conversations: what is learnt of them equals what TRL and transformers learn; what is wrong is named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hf_gpipe.data.chat_examples import ChatExamples
from hf_gpipe.data.chats import conversation_of
from hf_gpipe.data.rows import ReadRow, corpus_of_rows
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from tests.data.chat_templates import MARKED, conversations, tokenizer, without_markers

#: Tokens at which some conversations are cut, and some have no target left.
MAX_LENGTH = {"qwen 3": 80, "llama 3": 40, "gemma 3": 40, "mistral": 24, "phi 4": 24}
Example = dict[str, list[int]]

PAIR = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def plain() -> Any:
    return tokenizer()


def with_template(made: Any, template: str) -> Any:
    made.chat_template = template
    return made


def by_trl(rows: list[dict[str, Any]], made: Any, max_length: int, **options: Any) -> list[Example]:
    """What TRL's SFTTrainer makes of a dataset, by its own functions and without a model."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import SFTTrainer

    args = {"assistant_only_loss": True, "max_length": max_length, "truncation_mode": "keep_start", **options}
    trainer = SimpleNamespace(
        _tokenizer=made, chat_template=None, completion_only_loss=args.pop("completion_only_loss", False)
    )
    settings = SimpleNamespace(dataset_num_proc=None, dataset_text_field="text", shuffle_dataset=False, **args)
    # A column of JSON: Arrow would give the arguments of every tool call the same keys.
    found = SFTTrainer._prepare_dataset(trainer, Dataset.from_list(rows), made, settings, False, None, "train")
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in found]


def by_transformers(rows: list[dict[str, Any]], made: Any, max_length: int) -> list[Example]:
    """The same in a few lines: apply_chat_template's own mask, cut, and rows without a target left out."""
    found = []
    for row in rows:
        marked = made.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
        labels = [one if is_learnt else -100 for one, is_learnt in pairs][:max_length]
        if any(label != -100 for label in labels[1:]):
            found.append({"input_ids": marked["input_ids"][:max_length], "labels": labels})
    return found


@pytest.mark.parametrize("expected", [by_transformers, by_trl])
@pytest.mark.parametrize("family", MARKED)
def test_the_labels_are_those_of_markers_with_and_without_them(
    family: str, expected: Callable[..., list[Example]], plain: Any
) -> None:
    rows, max_length = conversations(family, 40), MAX_LENGTH[family]
    with_template(plain, MARKED[family])
    wanted = expected([{"tools": None, **row} for row in rows], plain, max_length)
    marked = ChatExamples(rows, plain, max_length=max_length)
    unmarked = ChatExamples(rows, with_template(plain, without_markers(MARKED[family])), max_length=max_length)
    assert list(marked) == wanted
    assert list(unmarked) == wanted
    assert (marked.num_dropped, marked.num_truncated) == (unmarked.num_dropped, unmarked.num_truncated)
    assert 0 < marked.num_dropped == 40 - len(wanted) < marked.num_truncated < 40
    assert marked.lengths == [len(row["input_ids"]) for row in wanted]


@pytest.mark.parametrize("is_text", [False, True])
def test_prompts_and_completions_are_trl_s(is_text: bool, plain: Any) -> None:
    with_template(plain, without_markers(MARKED["llama 3"]))
    turns = [row["messages"][-3:-1] for row in conversations("mistral", 30) if len(row["messages"]) > 3]
    if is_text:
        rows: list[dict[str, Any]] = [{"prompt": one["content"], "completion": two["content"]} for one, two in turns]
        rows += [{"prompt": "stages", "completion": text} for text in ("", " ")]
    else:
        rows = [{"prompt": [one], "completion": [{**two, "role": "assistant"}]} for one, two in turns]
    for only in (True, False):
        options: dict[str, Any] = {"completion_only_loss": only, "assistant_only_loss": False}
        mine = ChatExamples(rows, plain, max_length=40, **options)
        assert list(mine) == by_trl(rows, plain, 40, **options)


def test_either_end_is_kept_and_a_row_without_a_predicted_target_is_dropped(plain: Any) -> None:
    with_template(plain, MARKED["mistral"])
    rows = [{"messages": [{"role": "user", "content": "stages " * n}, PAIR[1]]} for n in (1, 50)]
    whole = ChatExamples(rows, plain, max_length=None)
    assert (len(whole), whole.num_truncated) == (2, 0)
    end = ChatExamples(rows, plain, max_length=12, truncation_mode="keep_end")
    assert [row["input_ids"] for row in end] == [row["input_ids"][-12:] for row in whole]
    assert ChatExamples(rows, plain, max_length=12).num_dropped == 1
    learnt = [number for number, label in enumerate(whole[1]["labels"]) if label != -100]
    # Its first target is all that is left, and nothing is left to predict it from.
    one = ChatExamples([*rows[:1], rows[1]], plain, max_length=learnt[0] + 1)
    assert one.num_dropped == 0
    with pytest.raises(DataError, match="of 1 conversations none is left in 12 tokens: 1 were dropped because"):
        ChatExamples(rows[1:], plain, max_length=12)


def test_a_generation_prompt_that_goes_on_with_reasoning(plain: Any) -> None:
    """The prompt of models that always reason ends in <think>, which earlier turns do not have."""
    head, tail = without_markers(MARKED["qwen 3"]).rsplit("assistant\n", 1)
    template = f"{head}assistant\n<think>\n{tail}"
    row = {"messages": [*PAIR, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}
    (example,) = ChatExamples([row], with_template(plain, template))
    learnt = [one for one, label in zip(*example.values(), strict=True) if label != -100]
    assert plain.decode(learnt) == "b<|im_end|>\n\n</think>\n\nd<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, PAIR, "has no chat template; give a file with one in data.chat_template"),
        ("{{ raise_exception('no') }}", PAIR, "row 0: the chat template refuses the conversation: no; correct the row"),
        (
            "some text: {% generation %}{% endgeneration %}y",
            PAIR,
            "row 0: the chat template's {% generation %} markers are around",
        ),
        (without_markers(MARKED["llama 3"]), PAIR[1:], "messages[0] is an assistant turn with nothing before it"),
        # As some of Mistral's: the system prompt moves to the last user's turn.
        (
            "{% for m in messages %}{{ (loop.index if loop.revindex < 3 else '') ~ m.content }}{% endfor %}",
            PAIR * 2,
            "messages[1] begins in another way than as the end of a conversation; give a template with {% generation",
        ),
        (
            "{% for m in messages %}{{ m.content ~ (loop.length if m.role == 'assistant' else '') }}{% endfor %}",
            PAIR * 2,
            "messages[1] ends in another way than as the end of a conversation; give a template with {% generation",
        ),
    ],
)
def test_a_template_that_does_not_show_what_the_assistant_says(
    template: str | None, messages: list[dict[str, str]], message: str, plain: Any
) -> None:
    with_template(plain, template)
    with pytest.raises(DataError) as caught:
        ChatExamples([{"messages": messages}], plain)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "x: neither 'messages' nor 'prompt' with 'completion' is there; "),
        ({"prompt": "a"}, "the columns found are prompt"),
        ({"messages": PAIR, "prompt": "a", "completion": "b"}, "both 'messages' and 'prompt'"),
        ({"messages": PAIR, "conversations": PAIR}, "both 'messages' and 'conversations'"),
        ({"messages": []}, "x: messages is []; it must be a list"),
        ({"messages": ["hello"]}, "x: messages[0] is 'hello'; a message is"),
        (
            {"messages": [{"role": "asistant", "content": "a"}]},
            "messages[0].role is 'asistant'; the roles are system, ",
        ),
        ({"conversations": [{"from": "humam", "value": "a"}]}, "messages[0].from is 'humam'; "),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content is [{'type': 'image'}]",
        ),
        (
            {"messages": PAIR[:1]},
            "x: messages has no assistant turn (only user), so nothing is learnt; leave the row out",
        ),
        ({"prompt": PAIR, "completion": PAIR[:1]}, "completion has no assistant turn"),
        ({"prompt": "a", "completion": PAIR}, "'prompt' is text, 'completion' is not"),
        ({"messages": PAIR, "tools": "[{"}, "tools is text that is not JSON"),
        ({"messages": [PAIR[0], PAIR[1] | {"weight": 0.5}]}, "messages[1].weight is 0.5; it must be 1, or 0"),
        ({"conversations": PAIR, "system": 3}, "x: system is 3; it must be text"),
        (
            {"conversations": [{"from": "system", "value": "a"}, *PAIR], "system": "b"},
            "both 'system' and a first message of the system",
        ),
    ],
)
def test_what_is_no_conversation(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        conversation_of("x", row)
    assert message in str(caught.value)


def test_sharegpt_and_columns_of_arrow_are_messages() -> None:
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 3}
    of_arrow = {"messages": [{**message, "tool_calls": None} for message in PAIR], "prompt": None, "tools": None}
    wanted = {"messages": PAIR}
    assert conversation_of("x", shared) == conversation_of("x", of_arrow) == wanted
    assert conversation_of("x", {"messages": PAIR, "tools": "[1]"}) == {**wanted, "tools": [1]}
    system = {"role": "system", "content": "s"}
    assert conversation_of("x", shared | {"system": "s"}) == {"messages": [system, *PAIR]}
    assert conversation_of("x", shared | {"system": ""}) == wanted


def test_keys_that_arrow_adds_to_tools_and_calls_are_not_learnt(plain: Any, tmp_path: Path) -> None:
    """Arguments and properties that Arrow had filled with null were text of the conversation."""

    def row(name: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": {name: "x"}}}
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {name: {"type": "string"}}}},
        }
        turns = [PAIR[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "y"}]
        return {"messages": [*turns, PAIR[1]], "tools": [tool]}

    rows = [row("find"), row("open")]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    filled = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert filled[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"find": "x", "open": None}
    with_template(plain, MARKED["qwen 3"])
    assert list(ChatExamples(filled, plain)) == by_transformers(rows, plain, 1000)


@pytest.mark.parametrize("family", ["qwen 3", "mistral"])
@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("assistant_only", [True, False])
def test_a_message_of_weight_zero_is_not_learnt(
    family: str, has_markers: bool, assistant_only: bool, plain: Any
) -> None:
    """Its weight was ignored: the turn was learnt like the others."""
    with_template(plain, MARKED[family] if has_markers else without_markers(MARKED[family]))
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}] * 3
    weighted = [message | {"weight": int(number != 3)} for number, message in enumerate(turns)]
    options: dict[str, Any] = {"assistant_only_loss": assistant_only}
    (whole,) = ChatExamples([{"messages": turns}], plain, **options)
    (example,) = ChatExamples([{"messages": weighted}], plain, **options)
    (of_turns,) = ChatExamples([{"messages": turns}], plain)
    learnt = [place for place, label in enumerate(of_turns["labels"]) if label != -100]
    runs = [list(run) for _, run in itertools.groupby(learnt, lambda place: place - learnt.index(place))]
    expected = [-100 if place in runs[1] else label for place, label in enumerate(whole["labels"])]
    assert example == {"input_ids": whole["input_ids"], "labels": expected}
    assert len(runs) == 3


def test_a_template_that_does_not_teach_the_end_is_warned_of(plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With GLM-4's template, whose answers end where the next turn begins, the model never stopped, without a word."""
    for family in MARKED:
        ChatExamples(conversations(family, 5), with_template(plain, MARKED[family]))
    assert "learn to stop" not in caplog.text
    glm = "{% for m in messages %}{{ '[INST]' if m.role == 'user' else '[/INST]' }}{{ m.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '[/INST]' }}{% endif %}"
    ChatExamples([{"messages": PAIR * 2}], with_template(plain, glm + prompt))
    assert "no target of the first conversations ends in a special token, so the model does not learn to stop" in (
        caplog.text
    )
    assert "data.chat_template" in caplog.text


def of(path: Path | str, **options: Any) -> Corpus[ReadRow]:
    return corpus_of_rows(DataSection(kind="chat", path=str(path), **options), conversation_of, "conversations")


def test_the_example_s_conversations_are_read() -> None:
    corpus = of(Path(__file__).parents[2] / "examples/chats.jsonl")
    assert len(corpus.train) + len(corpus.validation) + len(corpus.test) == 20


def test_files_directories_and_their_splits(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": str(number)}, PAIR[1]]} for number in range(40)]
    everything: dict[str, Any] = {"validation_fraction": 0.0, "test_fraction": 0.0}
    texts = [ReadRow.of("", row, conversation_of).text for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.json", "c.parquet"):
        assert [one.text for one in of(tmp_path / name, **everything).train] == texts
    assert len(of(tmp_path, **everything).train) == 120
    assert len(of(tmp_path / "a.jsonl", max_examples=5, **everything).train) == 5
    corpus = of(tmp_path / "a.jsonl", validation_fraction=0.2, test_fraction=0.2)
    assert sorted(one.text for part in (corpus.train, corpus.validation, corpus.test) for one in part) == sorted(texts)
    assert min(len(corpus.validation), len(corpus.test)) > 0
    assert list(of(tmp_path / "a.jsonl", max_examples=1, **everything).texts())[1] == "b"
    split = tmp_path / "split"
    split.mkdir()
    for name, part in (("train", rows[:30]), ("test", rows[30:])):
        (split / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    corpus = of(split, validation_fraction=0.0)
    assert ([one.text for one in corpus.train], [one.text for one in corpus.test]) == (texts[:30], texts[30:])
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps({"messages": PAIR[:1]}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: messages has no assistant turn"):
        of(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(DataError, match=r"b\.json, entry 1 is a JSON int; write an object"):
        of(tmp_path / "b.json")
