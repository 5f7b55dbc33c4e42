"""Training tasks: what is learnt of the rows of a corpus, a file or a folder each.

No package of the core imports one. `hf_gpipe.registry` finds a task by the name of its module, or by its kind of data.
Its module has:

    TASK       a `Task` (`hf_gpipe.from_recipe.tasks`), what a recipe needs of it
    a loss     a `NotingLoss` with options, if it is not the cross-entropy
    examples   `EncodedRows`, by which rows are read and encoded
    a trainer  a `TaskTrainer`, and the arguments of that
"""
