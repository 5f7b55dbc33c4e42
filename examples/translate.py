"""Fine-tune a translation model from a directory (or a Hub id) on a file of pairs, and translate with it.

    python examples/translate.py MODEL PAIRS OUTPUT [--num_stages 4 ...]
    torchrun --nproc-per-node 4 examples/translate.py MODEL PAIRS OUTPUT --num_stages 4
    accelerate launch --num_processes 4 examples/translate.py MODEL PAIRS OUTPUT --num_stages 4

PAIRS is a file of JSON lines {"source": ..., "target": ...}; its last tenth is kept for evaluation. All
arguments of PipelineTrainingArguments may follow, such as --max_steps 1000 --bf16 --learning_rate 1e-4. A model whose
tokenizer has codes of languages needs --source_language and --target_language, as deu_Latn and eng_Latn for NLLB.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import load_dataset
from sacrebleu.metrics import CHRF
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, EvalPrediction, GenerationConfig, HfArgumentParser

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.tasks.translation.language_codes import LanguageCodes


@dataclass
class Languages:
    """The tokenizer's codes of the languages of the file."""

    source_language: str | None = None
    target_language: str | None = None


def main(model: str, pairs: str, output: str, *options: str) -> None:
    defaults = ["--predict_with_generate", "--num_micro_batches", "4", "--eval_strategy", "epoch"]
    parser = HfArgumentParser([PipelineTrainingArguments, Languages])
    args, languages = parser.parse_args_into_dataclasses(["--output_dir", output, *defaults, *options])
    tokenizer = AutoTokenizer.from_pretrained(model)
    if codes := LanguageCodes.of(tokenizer, {}):
        tokenizer.src_lang = codes.code(languages.source_language or "")
        tokenizer.tgt_lang = codes.code(languages.target_language or "")
        args.generation_config = GenerationConfig.from_pretrained(model)
        args.generation_config.update(**codes.starting(languages.target_language))

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return dict(tokenizer(row["source"], text_target=row["target"], truncation=True, max_length=128))

    rows = load_dataset("json", data_files=pairs, split="train")
    split = rows.map(encode, remove_columns=rows.column_names).train_test_split(test_size=0.1, shuffle=False)

    def chrf(prediction: EvalPrediction) -> dict[str, float]:
        ids = [np.where(ids < 0, tokenizer.pad_token_id, ids) for ids in (prediction.predictions, prediction.label_ids)]
        found, wanted = (tokenizer.batch_decode(one, skip_special_tokens=True) for one in ids)
        return {"chrf": CHRF().corpus_score(found, [wanted]).score}

    trainer = PipelineTrainer(
        model=model,
        args=args,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        compute_metrics=chrf,
    )
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"chrF {metrics['eval_chrf']:.1f}; the model is in {output}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
