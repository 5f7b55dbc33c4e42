"""Modes: ways to run a pipeline beyond forwards, recomputations and backwards, a folder each.

The packages of the core import none of them. `hf_gpipe.registry` names the modes, and finds these modules of each; a
mode has those that it needs:

    key      without torch; it has
             FIELDS = {field of a configuration: (its `Mode`, the one of a configuration where all is decided)}
    table    without torch; imported with `hf_gpipe.schedule`. It adds kinds of actions (`kinds.add_kind`), whose
             records say what they need, hold and check, and has
             apply(table, recompute) -> the table with the mode's actions; `recompute` is an entry for each stage
    cost     what the planner reads:
             seconds(layout) -> {kind: the seconds of an action of each stage}
             amounts(sums, stage, of_graph) -> {thing held: {item of the estimate: bytes on the device}}; `of_graph` has
             those of a graph
             host_amounts(sums, stage) -> {thing held: bytes in CPU memory}
    building Builder, a `ModeBuilder`: what the mode does while a pipeline is built
    runtime  what the executor calls:
             State(rows), a `ModeState`, which actions find in `Step.modes` under the mode's name
             perform(kind, run) is called for each kind of the mode (`hf_gpipe.runtime.performing`)
"""
