"""hf-gpipe merge ADAPTERS --output DIR: peft adapters and their model become one model in Hub format."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hf_gpipe.commands.base import Parser, loading, run_with_options
from hf_gpipe.errors import UserError

DESCRIPTION = """\
Merge saved peft adapters into the weights of their model. The output is a model in Hub format with its tokenizer, which
plain transformers loads without peft. Every weight equals that of peft's merge_and_unload, and the weights of one shard
are in memory at a time, 1 GiB or one layer.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_with_options(argv, _parser(), _merge)


def _parser() -> Parser:
    parser = Parser(DESCRIPTION, "merge")
    parser.add_argument("adapters", help="directory of saved peft adapters")
    parser.add_argument("--output", required=True, help="directory for the model, new or empty")
    parser.add_argument("--base", help="Hub id or directory of the model (default: the one that the adapters name)")
    parser.add_argument("--dtype", help="type of the weights, such as bfloat16 (default: the model's)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code of the model")
    return parser


def _merge(args: argparse.Namespace) -> int:
    name = "adapter_config.json"  # of peft, which takes seconds to import
    if not os.path.isfile(os.path.join(args.adapters, name)):
        raise UserError(f"there is no {name} in {args.adapters!r}; give a directory of saved peft adapters")
    with loading():
        from hf_gpipe.checkpoint.peft import base_of
        from hf_gpipe.model.merging import classifier_fields, merge
        from hf_gpipe.model.spec import ModelSpec

    adapters, trusts = str(args.adapters), args.trust_remote_code
    base = args.base or base_of(adapters)
    source = _with_tokenizer(adapters, base)
    spec = ModelSpec.of(
        base,
        peft_config=adapters,
        dtype=args.dtype,
        trust_remote_code=trusts,
        config_overrides=classifier_fields(
            base, Path(adapters), partial(_padding, source, trust_remote_code=trusts), trust_remote_code=trusts
        ),
    )
    count = merge(spec, Path(args.output), partial(_copy_tokenizer, source, trust_remote_code=trusts))
    without = "" if source else f"; without a tokenizer, as neither {adapters} nor {base} has files of one"
    print(f"{args.output}: {base} with {adapters} merged into it, {count} shard{'s' * (count > 1)}{without}")
    return 0


def _with_tokenizer(adapters: str, base: str) -> str | None:
    """The directory or Hub id of the tokenizer: the adapters', or else the model's. None: neither directory has one."""
    from hf_gpipe.data.tokenizer import has_tokenizer

    if has_tokenizer(adapters):
        return adapters
    return base if has_tokenizer(base) or not Path(base).is_dir() else None


def _padding(source: str | None, *, trust_remote_code: bool) -> int | None:
    from hf_gpipe.data.collate import PairCollator
    from hf_gpipe.data.tokenizer import read_tokenizer

    if source is None:
        return None
    return PairCollator.for_tokenizer(read_tokenizer(source, trust_remote_code=trust_remote_code)).pad_token_id


def _copy_tokenizer(source: str | None, to: Path, *, trust_remote_code: bool) -> None:
    """Copy the files of a directory byte for byte; the tokenizer of a Hub id is read and saved."""
    from hf_gpipe.data.tokenizer import read_tokenizer, tokenizer_files

    if source is not None and not Path(source).is_dir():
        read_tokenizer(source, trust_remote_code=trust_remote_code).save_pretrained(to)
        return
    for file in tokenizer_files(source) if source is not None else ():
        copied = to / file.relative_to(str(source))
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)
