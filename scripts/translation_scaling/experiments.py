"""The experiments on the corpus of message catalogues: which runs each has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_gpipe.errors import UserError, nearest
from translation_scaling.runs import Run, check_run

_RECIPES = Path(__file__).parents[2] / "recipes" / "translation"

RATES = (1e-3, 2e-3, 4e-3)
SWEEP_STEPS = 1000
"""Updates of each run of the sweep of learning rates: the models begin to translate within them."""

FIXED_PASSES = 3
"""Passes of the runs that are compared with others at equal updates instead of at their ends."""

#: Target tokens of an update: a thousandth of the paper's.
BATCH_TOKENS = (4000, 1000, 260)
#: Updates that all sizes are compared at; the smaller ones are compared at the largest one's tokens too.
BATCH_UPDATES = 1500

#: The third of the recipe's languages that has the fewest pairs in the corpus of the default packages.
LOW = (
    *("he", "cy", "mai", "fy", "ga", "my", "ks", "brx", "xh", "gd", "sq", "nds", "be_Latn", "si", "or", "co", "wa"),
    *("az", "ps", "af", "ab", "kab", "hne", "ia", "mn", "am", "ie", "hy", "tt", "ff", "ku", "tg", "ky", "uz"),
)
#: The Romance languages of the corpus, and two made from them: from 33,000 pairs to a few hundred, many words alike.
RELATED = ("fr", "es", "ca", "it", "pt", "pt_BR", "gl", "ro", "oc", "ast", "an", "fur", "co", "wa", "ia", "ie")
#: Ten of them, from the fewest pairs to the most.
ALONE = ("ie", "ia", "wa", "co", "an", "fur", "ast", "oc", "ro", "fr")
#: Of each third three languages, apart in size and script.
BILINGUAL = ("fr", "ru", "ja", "ar", "ka", "id", "cy", "or", "mn")


@dataclass(frozen=True)
class Asked:
    """The options that all experiments share.

    Attributes:
        seed: training.seed.
        overrides: key=value.
        output: folder of all runs.
        sweep_steps: updates of each run of a sweep of learning rates.
    """

    seed: int
    overrides: Sequence[str]
    output: Path
    sweep_steps: int = SWEEP_STEPS


@dataclass(frozen=True)
class Experiment:
    """Some runs that answer a question.

    Attributes:
        name: on the command line.
        question: in a few words.
        runs: its runs, in order.
        compares: whether its runs are trained and tested on the same pairs, so that the report can compare them.
        baselines: the experiment with models of one language, which its report compares them with; None: there is none.
    """

    name: str
    question: str
    runs: Callable[[Asked], list[Run]]
    compares: bool = True
    baselines: str | None = None


def _recipe(model: str) -> Path:
    return _RECIPES / f"l10n-{model}.yaml"


#: The deep model with twice the layers has no recipe of its own.
_DEEPER = ("model.config.encoder_layers=16", "model.config.decoder_layers=16")
_CONSTANT = (f"training.num_train_epochs={FIXED_PASSES}", "training.decay_steps=0")


#: The related languages, and with the mini-batches of their sweep.
_OF_RELATED = (f"data.languages=[{', '.join(RELATED)}]", "tokenizer.vocab_size=4000")
_RELATED_TOKENS = 2000
_RELATED = (*_OF_RELATED, f"training.batch_tokens={_RELATED_TOKENS}")

#: One language: a thousand pairs yield little more than 2,000 different tokens.
_OF_ONE = "tokenizer.vocab_size=2000"

#: A sweep is decided by its losses, and needs no model.
_LAST = "training.load_best_model_at_end=false"


def _sweep(model: str, asked: Asked, *own: str, label: str = "") -> list[Run]:
    recipe = _recipe(model.removeprefix("deeper") or "deep")
    few = (f"training.max_steps={asked.sweep_steps}", "training.decay_steps=0", "evaluation.max_examples=1", _LAST)
    return [
        _run(asked, recipe, _named("rate", label, model, f"{rate:g}"), *own, *few, f"training.learning_rate={rate}")
        for rate in RATES
    ]


def _trained(
    model: str, asked: Asked, *own: str, label: str = "", to_end: bool = True, has_own_sweep: bool = False
) -> Run:
    """A run with the learning rate that the sweep of its model gives; `has_own_sweep`: with the run's own overrides."""
    of_model = _DEEPER if model == "deeper" else ()
    sweep = tuple(
        _sweep(model, asked, *of_model, *own, label=label) if has_own_sweep else _sweep(model, asked, *of_model)
    )
    recipe = _recipe("deep" if model == "deeper" else model)
    constant = () if to_end else _CONSTANT
    return _run(asked, recipe, _named("l10n", label, model), *of_model, *constant, *own, to_end=to_end, sweep=sweep)


def _named(*words: str) -> str:
    return "-".join(word for word in words if word)


def _run(asked: Asked, recipe: Path, name: str, *own: str, to_end: bool = False, sweep: tuple[Run, ...] = ()) -> Run:
    return Run(recipe, asked.seed, (*asked.overrides, *own), asked.output, name, to_end, sweep)


def _rates(asked: Asked) -> list[Run]:
    return [run for model in ("base", "deep", "wide") for run in _sweep(model, asked)]


def _main(asked: Asked) -> list[Run]:
    return [_trained(model, asked) for model in ("base", "deep", "wide")]


def _deeper(asked: Asked) -> list[Run]:
    return [_trained(model, asked) for model in ("base", "deep", "deeper")]


def _batch(asked: Asked) -> list[Run]:
    """Each size with as many updates as the largest, and with as many tokens."""
    updates = {(tokens, BATCH_UPDATES * of // tokens) for tokens in BATCH_TOKENS for of in (tokens, max(BATCH_TOKENS))}
    return [_of_batch(asked, *one) for one in sorted(updates, key=lambda one: (-one[1] * one[0], -one[0]))]


def _of_batch(asked: Asked, tokens: int, updates: int) -> Run:
    every = max(100, updates // 30)
    own = (
        *(f"training.batch_tokens={tokens}", f"training.max_steps={updates}"),
        *(f"training.decay_steps={updates // 5}", f"training.eval_steps={every}", f"training.save_steps={every}"),
    )
    name = _named("l10n", "batch", str(tokens), str(updates), "base")
    return _with_rate_of_related(_run(asked, _recipe("base"), name, *_OF_RELATED, *own), asked, tokens)


def _with_rate_of_related(run: Run, asked: Asked, tokens: int) -> Run:
    """A run of base with updates of so many tokens, with the rate that was swept for the related languages.

    With Adam the rate is to grow as the root of the size of a mini-batch (Malladi et al., arXiv 2205.10287).
    """
    sweep = tuple(_sweep("base", asked, *_RELATED, label="related"))
    return replace(run, sweep=sweep, rate_factor=round(math.sqrt(tokens / _RELATED_TOKENS), 4))


def _stability(asked: Asked) -> list[Run]:
    scaled, clipped = "model.depth_scaled_feed_forward=true", "training.logit_clipping=20.0"
    return [
        _trained("deep", asked, *own, label=label, to_end=False)
        for label, own in (
            ("plain", ()),
            ("scaled", (scaled,)),
            ("clipped", (clipped,)),
            ("scaled-clipped", (scaled, clipped)),
        )
    ]


def _temperature(asked: Asked) -> list[Run]:
    return [_trained("deep", asked, f"data.temperature={t}", label=f"T-{t}", to_end=False) for t in (1, 5, 100)]


def _bilingual(asked: Asked) -> list[Run]:
    return [
        _trained(
            *("base", asked, f"data.languages=[{language}]", _OF_ONE, "training.batch_tokens=1000"),
            *("training.eval_steps=10", "training.save_steps=10"),
            label=f"only-{language}",
        )
        for language in BILINGUAL
    ]


def _low(asked: Asked) -> list[Run]:
    languages = f"data.languages=[{', '.join(LOW)}]"
    # The end is found only if the last tenth of the updates has an evaluation, and here they are few.
    own = (languages, "training.eval_steps=25", "training.save_steps=25")
    return [_trained(model, asked, *own, label="low") for model in ("base", "deep", "wide")]


def _related(asked: Asked) -> list[Run]:
    return [
        _trained(model, asked, *_RELATED, label="related", has_own_sweep=True) for model in ("base", "deep", "wide")
    ]


def _alone(asked: Asked) -> list[Run]:
    tokens = 1000
    return [
        _with_rate_of_related(
            _run(
                *(asked, _recipe("base"), f"l10n-alone-{language}-base", f"data.languages=[{language}]"),
                *(_OF_ONE, f"training.batch_tokens={tokens}", "training.warmup_steps=100"),
                # The end is found only if the last tenth of the updates has an evaluation, and here they are few.
                *("training.eval_steps=50", "training.save_steps=50"),
                to_end=True,
            ),
            *(asked, tokens),
        )
        for language in ALONE
    ]


EXPERIMENTS = (
    Experiment("rates", "which learning rate each model learns fastest with", _rates, compares=False),
    Experiment("main", "base, deep and wide, each to its end", _main, baselines="bilingual"),
    Experiment("batch", "260, 1000 and 4000 target tokens an update, on the related languages", _batch),
    Experiment("stability", "scaled feed-forward initialisation and clipped logits, on and off", _stability),
    Experiment("temperature", "T = 1, 5 and 100", _temperature),
    Experiment("deeper", "twice the layers of deep", _deeper),
    Experiment("low", "the languages with the fewest pairs alone", _low),
    Experiment("related", "sixteen related languages alone, which share much", _related, baselines="alone"),
    Experiment("alone", "ten of the related languages, each one alone", _alone, compares=False),
    Experiment("bilingual", "one language alone, for nine languages", _bilingual, compares=False),
)


def experiment(name: str) -> Experiment:
    """The experiment with this name. Raises UserError if there is none."""
    names = [one.name for one in EXPERIMENTS]
    if name not in names:
        raise UserError(
            f"{name!r} is neither a recipe (.yaml) nor an experiment{nearest(name, names)}; the experiments are "
            f"{', '.join(names)}"
        )
    return EXPERIMENTS[names.index(name)]


def plan_experiments(names: Sequence[str], asked: Sequence[Asked]) -> list[Run]:
    """The runs of experiments in order, each one once, and before it the sweep of learning rates that it needs.

    Args:
        names: of the experiments.
        asked: for each seed.
    """
    runs: dict[tuple[str, int], Run] = {}
    for of_seed in asked:
        for name in names:
            for run in experiment(name).runs(of_seed):
                for one in (*run.sweep, run):
                    runs.setdefault((one.name, one.seed), one)
    for run in runs.values():
        check_run(run)
    return list(runs.values())
