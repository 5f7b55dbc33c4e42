"""hf-gpipe generate MODEL [TEXT]: try a checkpoint: generate for a text, a chat turn or lines of stdin."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from hf_gpipe.commands.base import Parser, loading, run_with_options
from hf_gpipe.errors import UserError, check_count
from hf_gpipe.sources import is_here

DESCRIPTION = """\
Generate with a checkpoint, in stages. The text is the user's turn of a chat if the tokenizer has a chat template, and
otherwise the source of an encoder-decoder or the beginning of a text. Only what the model adds to the text is printed.
Without TEXT, each line of stdin is a text. The checkpoint's generation configuration decides the options that you leave
out, except --max-new-tokens. This process has all stages, spread over its GPUs; under torchrun the processes that
torchrun started share them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_with_options(argv, _parser(), _generate)


def _parser() -> Parser:
    parser = Parser(DESCRIPTION, "generate")
    parser.add_argument("model", help="Hub id or directory of a model with its tokenizer, or of peft adapters")
    parser.add_argument("text", nargs="?", help="the text (default: each line of stdin is a text)")
    parser.add_argument("--num-stages", type=int, help="number of stages (default: one for each process or GPU)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="maximum number of new tokens (default: 128)")
    parser.add_argument("--num-beams", type=int, help="number of beams of the search")
    parser.add_argument("--do-sample", action="store_true", default=None, help="sample instead of searching")
    parser.add_argument("--temperature", type=float, help="temperature of the sampling: logits are divided by it")
    parser.add_argument(
        "--top-p", type=float, help="sample from the likeliest tokens that together have this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--system", help="system message of the chat")
    parser.add_argument("--plain", action="store_true", help="do not use the chat template")
    parser.add_argument("--source-language", help="code of the texts' language, for a tokenizer that has such codes")
    parser.add_argument("--target-language", help="code of the language to translate into, for such a tokenizer")
    parser.add_argument("--batch-size", type=int, default=8, help="number of lines of stdin in a batch (default: 8)")
    parser.add_argument("--dtype", help="type of the weights, such as bfloat16 (default: the checkpoint's)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="kind of device (default: auto)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code of the model")
    return parser


def _generate(args: argparse.Namespace) -> int:
    is_here(args.model)
    with loading():
        import torch

        from hf_gpipe.adapters.text_entries import token_ids
        from hf_gpipe.data.tokenizer import read_tokenizer
        from hf_gpipe.job.agreement import compare
        from hf_gpipe.job.joining import join_job
        from hf_gpipe.pipeline import Pipeline
        from hf_gpipe.settings.pipeline import PipelineConfig

    job = join_job(PipelineConfig.model_fields["timeout_seconds"].default)
    # The main process alone reads the texts, and each process may have a device of its own.
    compare(lambda: {n: value for n, value in vars(args).items() if n not in ("text", "device", "model")}, "options")
    if args.batch_size < 1:
        raise UserError(f"--batch-size is {args.batch_size}; it must be at least 1")
    check_count("--seed", args.seed, -(2**63), 2**64 - 1)
    tokenizer = read_tokenizer(args.model, trust_remote_code=args.trust_remote_code)
    device, num_stages = args.device, args.num_stages
    num_gpus = torch.cuda.device_count() if device != "cpu" and "RANK" not in os.environ else 0
    if num_gpus > 1:
        num_stages = num_stages or num_gpus
        device = [f"cuda:{number}" for number in range(min(num_gpus, num_stages))]
    pipe = Pipeline(args.model, num_stages, device=device, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    torch.manual_seed(args.seed)
    names = ("max_new_tokens", "num_beams", "do_sample", "temperature", "top_p")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    is_decoder_only = not pipe.adapter.config.is_encoder_decoder
    options |= _in_languages(tokenizer, args)
    lines = _lines(args)
    while texts := pipe.world.from_main(lambda: next(lines, []), takes_long=True):
        inputs = _encoded(tokenizer, texts, args, is_decoder_only=is_decoder_only)
        ids = pipe.generate(**inputs, **options)
        added = ids[:, token_ids(inputs).shape[1] :] if is_decoder_only else ids
        if pipe.world.is_main:
            for text in tokenizer.batch_decode(added, skip_special_tokens=True):
                print(text, flush=True)
    job.leave()
    return 0


def _in_languages(tokenizer: Any, args: argparse.Namespace) -> dict[str, int]:
    """Let the tokenizer encode the texts' language; returns the argument of `generate` of the target's language."""
    from hf_gpipe.tasks.translation.language_codes import LanguageCodes

    names = {name: value for name in ("source_language", "target_language") if (value := getattr(args, name))}
    codes = LanguageCodes.of(tokenizer, {})
    if codes is None:
        for name in names:
            raise UserError(f"--{name.replace('_', '-')}: the tokenizer has no codes of languages; leave it out")
        return {}
    if args.source_language is not None:
        tokenizer.src_lang = codes.code(args.source_language)
    return {} if args.target_language is None else codes.starting(args.target_language)


def _lines(args: argparse.Namespace) -> Iterator[list[str]]:
    """The texts, so many at a time; those of a terminal one by one."""
    if args.text is not None:
        yield [args.text]
        return
    size = 1 if sys.stdin.isatty() else args.batch_size
    while lines := list(islice(sys.stdin, size)):
        yield [line.rstrip("\n") for line in lines]


def _encoded(
    tokenizer: Any, texts: Sequence[str], args: argparse.Namespace, *, is_decoder_only: bool
) -> dict[str, Any]:
    """The `input_ids` and `attention_mask` of texts or chat turns, (B, T)."""
    from hf_gpipe.adapters.text_entries import text_entries, token_ids

    is_chat = bool(tokenizer.chat_template) and not args.plain
    if is_chat:
        system = [{"role": "system", "content": args.system}] if args.system is not None else []
        chats = [[*system, {"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    elif args.system is not None:
        raise UserError("--system is of a chat, and no chat template is used; leave it out")
    if is_decoder_only:
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:  # the mask leaves it out
            tokenizer.pad_token = tokenizer.eos_token
    # The template has written the special tokens.
    rows = token_ids(tokenizer(list(texts), add_special_tokens=not is_chat))
    if is_decoder_only:  # a text that goes on does not end with the token of the end
        rows = [row[:-1] if row[-1:] == [tokenizer.eos_token_id] else row for row in rows]
    if not all(rows):
        raise UserError("a text has no tokens; give some")
    return dict(tokenizer.pad(text_entries(rows), padding=len(rows) > 1, return_tensors="pt"))
