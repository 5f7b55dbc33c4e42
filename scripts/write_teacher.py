"""Writes the most likely tokens of a teacher for the rows of a recipe, for distillation without the teacher beside.

python scripts/write_teacher.py RECIPE FILE --k 64 [key=value ...]

The recipe names the teacher (distillation.teacher, distillation.quantization), the rows and the temperature. The
teacher runs alone, in one process. A training with distillation.top_k_file=FILE then needs no teacher.
"""

from __future__ import annotations

import argparse

from hf_gpipe.data.examples.teacher_file import write_top_k
from hf_gpipe.errors import RecipeError
from hf_gpipe.from_recipe.model import named_teacher
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.from_recipe.teaching import teacher_alone, top_k_of
from hf_gpipe.recipe import load_recipe


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("file")
    parser.add_argument("--k", type=int, default=64, help="tokens of a position")
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_intermixed_args(argv)
    recipe = load_recipe(options.recipe, options.overrides)
    spec, task = named_teacher(recipe), task_of(recipe)
    if spec is None:
        raise RecipeError("distillation.teacher is null; name the teacher")
    corpus = task.corpus(recipe)
    tokenizer = task.processor(recipe, corpus)
    pipe = teacher_alone(spec)
    splits = [split for split in (corpus.train, corpus.validation) if len(split)]
    rows = [
        row
        for split in splits
        for row in top_k_of(
            pipe,
            task.rows(recipe, split, tokenizer),
            options.k,
            temperature=recipe.distillation.temperature,
            batch_size=recipe.evaluation.batch_size,
        )
    ]
    vocabulary = pipe.adapter.reference.get_output_embeddings().weight.shape[0]
    write_top_k(options.file, rows, vocabulary=vocabulary, temperature=recipe.distillation.temperature)
    print(f"{options.file}: {options.k} tokens of each of {sum(len(ids) for ids, _, _ in rows)} positions")


if __name__ == "__main__":
    main()
