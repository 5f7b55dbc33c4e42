"""Chat templates of the shapes of five families, conversations, and a tokenizer that knows the templates' tokens."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA_3 = """{{- bos_token }}
{%- for m in messages %}
  {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
  {%- if m['role'] == 'assistant' %}{%- generation -%}{{- m['content'] | trim + '<|eot_id|>' }}{%- endgeneration -%}
  {%- else %}{{- m['content'] | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# The reasoning of the last answer alone is shown, as an empty block where there is none; tools are known.
QWEN_3 = """
{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set parts = (m.content or '').split('</think>') %}
    {%- set content = parts[-1].lstrip('\n') %}
    {%- set thought = parts[0].split('<think>')[-1] if parts|length > 1 else '' %}
    {{- '<|im_start|>assistant\n' }}
    {%- generation -%}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
    {%- endgeneration -%}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# The system prompt stands in the first user's turn; roles alternate.
GEMMA_3 = """{{- bos_token }}
{%- set first = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Roles must alternate') }}{%- endif %}
  {%- if m['role'] == 'assistant' %}
    {{- '<start_of_turn>model\n' }}
    {%- generation -%}{{- m['content'] | trim + '<end_of_turn>\n' }}{%- endgeneration -%}
  {%- else %}
    {{- '<start_of_turn>' + m['role'] + '\n' + (first if loop.first else '') }}
    {{- m['content'] | trim + '<end_of_turn>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

# No generation prompt: an answer directly follows the user's turn.
MISTRAL = """{{- bos_token }}
{%- set first = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
  {%- if m['role'] == 'assistant' %}
    {%- generation -%}{{- ' ' + m['content'] | trim + eos_token }}{%- endgeneration -%}
  {%- else %}{{- '[INST] ' + (first if loop.first else '') + m['content'] + '[/INST]' }}{%- endif %}
{%- endfor %}"""

# Without a generation prompt the conversation ends in the end-of-sequence token, which the last answer learns.
PHI_4 = """
{%- for m in messages %}
  {{- '<|' + m['role'] + '|>' }}
  {%- if m['role'] == 'assistant' %}
    {%- generation -%}
    {{- m['content'] + '<|end|>' }}{%- if loop.last %}{{- eos_token }}{%- endif %}
    {%- endgeneration -%}
  {%- else %}{{- m['content'] + '<|end|>' }}
    {%- if loop.last and not add_generation_prompt %}{{- eos_token }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

#: By family, with {% generation %} markers.
MARKED = {"llama 3": LLAMA_3, "qwen 3": QWEN_3, "gemma 3": GEMMA_3, "mistral": MISTRAL, "phi 4": PHI_4}

_SPECIAL = (
    *("<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
_TEXTS = (
    "what is a pipeline?",
    "stages",
    "A micro-batch is a part.",
    " two  spaces ",
    "naïve 🙂",
    "line\nbreak\n",
    "<b>",
)


def without_markers(template: str) -> str:
    """The template as a model's tokenizer has it."""
    return template.replace("{%- generation -%}", "{#- -#}").replace("{%- endgeneration -%}", "{#- -#}")


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, in which the templates' control tokens are single tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(_SPECIAL)
    )
    made.train_from_iterator([*_TEXTS] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def conversations(family: str, count: int) -> list[dict[str, Any]]:
    """Random conversations of one to four exchanges that the family's template accepts."""
    rng = random.Random(family)
    return [{"messages": _messages(rng, family), **_tools(rng, family)} for _ in range(count)]


def _messages(rng: random.Random, family: str) -> list[dict[str, Any]]:
    def text() -> str:
        return " ".join(rng.choices(_TEXTS, k=rng.randint(1, 3)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        answer = text()
        if family == "qwen 3" and rng.random() < 0.4:
            answer = f"<think>\n{text()}\n</think>\n\n{answer}"
        if family == "qwen 3" and rng.random() < 0.3:
            call = {"type": "function", "function": {"name": "find", "arguments": {"what": text()}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": text()})
        messages.append({"role": "assistant", "content": answer})
    if rng.random() < 0.2:
        messages.append({"role": "user", "content": text()})
    return messages


def _tools(rng: random.Random, family: str) -> dict[str, Any]:
    if family != "qwen 3" or rng.random() < 0.5:
        return {}
    return {"tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]}
