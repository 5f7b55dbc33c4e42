"""The experiments on the corpus of message catalogues: which runs each has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
BATCH_TOKENS = (260, 1000, 4000)

#: The third of the recipe's languages that has the fewest pairs in the corpus of the default packages.
LOW = (
    *("he", "cy", "mai", "fy", "ga", "my", "ks", "brx", "xh", "gd", "sq", "nds", "be_Latn", "si", "or", "co", "wa"),
    *("az", "ps", "af", "ab", "kab", "hne", "ia", "mn", "am", "ie", "hy", "tt", "ff", "ku", "tg", "ky", "uz"),
)
#: The Romance languages of the corpus, and two made from them: from 33,000 pairs to a few hundred, many words alike.
RELATED = ("fr", "es", "ca", "it", "pt", "pt_BR", "gl", "ro", "oc", "ast", "an", "fur", "co", "wa", "ia", "ie")
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
    """

    name: str
    question: str
    runs: Callable[[Asked], list[Run]]
    compares: bool = True


def _recipe(model: str) -> Path:
    return _RECIPES / f"l10n-{model}.yaml"


#: The deep model with twice the layers has no recipe of its own.
_DEEPER = ("model.config.encoder_layers=16", "model.config.decoder_layers=16")
_CONSTANT = (f"training.num_train_epochs={FIXED_PASSES}", "training.decay_steps=0")


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
    """The largest batches make as many updates as the middle ones, so that all can be compared at equal updates."""
    middle = BATCH_TOKENS[1]
    return [
        _trained(
            *("base", asked, f"training.batch_tokens={tokens}"),
            f"training.num_train_epochs={FIXED_PASSES * max(1, tokens // middle)}",
            label=f"batch-{tokens}",
            to_end=False,
        )
        for tokens in BATCH_TOKENS
    ]


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
            *("base", asked, f"data.languages=[{language}]", "training.batch_tokens=1000"),
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
    own = (f"data.languages=[{', '.join(RELATED)}]", "tokenizer.vocab_size=4000", "training.batch_tokens=2000")
    models = ("base", "deep", "wide")
    return [_trained(model, asked, *own, label="related", has_own_sweep=True) for model in models]


EXPERIMENTS = (
    Experiment("rates", "which learning rate each model learns fastest with", _rates, compares=False),
    Experiment("main", "base, deep and wide, each to its end", _main),
    Experiment("batch", "260, 1000 and 4000 target tokens an update", _batch),
    Experiment("stability", "scaled feed-forward initialisation and clipped logits, on and off", _stability),
    Experiment("temperature", "T = 1, 5 and 100", _temperature),
    Experiment("deeper", "twice the layers of deep", _deeper),
    Experiment("low", "the languages with the fewest pairs alone", _low),
    Experiment("related", "sixteen related languages alone, which share much", _related),
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
