"""Modes: ways to run a pipeline beyond forwards, recomputations and backwards, a folder each.

The packages of the core import none of them. `hf_gpipe.registry` names the modes, and finds these modules of each; a
mode has those that it needs:

    key      without torch; it has
             FIELDS = {field of a configuration: (its `Mode`, the one of a configuration where all is decided)}
             check_training(arguments, schedule, words, scales_loss=...) raises UserError for arguments of a training
             that do not go with the mode
    companion, a model beside the trained one (`hf_gpipe.model.companion`)
             check(spec, trained, loss) raises UserError unless there is one, which may be None, where the loss needs it
             open_model(spec, adapter, open_one) -> its adapter; raises UserError where the two models do not fit
    table    without torch; imported with `hf_gpipe.schedule`. It adds kinds of actions (`kinds.add_kind`), whose
             records say what they need and hold, and schedules (`hf_gpipe.schedule.named.SCHEDULES`). A mode has what
             it needs of
             apply(table, recompute) -> a builder's table with the mode's actions; `recompute` is an entry for each
             stage
             complete(table, config) -> any table of this configuration, that of a file too, with the mode's actions
             check(table, config) raises ScheduleError before a plan
             faults(table) yields what is wrong in a table
             with_updates_beside(table) -> the table with updates beside its backwards, or None
    cost     what the planner reads, of which a mode has what it needs:
             seconds(layout) -> {kind: the seconds of an action of each stage}
             turn_transfer_seconds(layout) -> the seconds of messages between turns
             amounts(sums, stage, of_graph) -> {thing held: {item of the estimate: bytes on the device}}; `of_graph` has
             those of a graph
             resident(layout, process, stages, there) -> what stays on the device, of what would be there
             old_versions(table, stage, process) -> the old versions of its weights that a stage keeps
             on_host(layout, timeline) -> {words: bytes in CPU memory of each process}
             hosted(layout, stage) -> the size of the weights that the CPU updates; None: the mode has none there
             host_update_seconds(layout, stage, weights) -> the seconds of an update by the host; None: a device does it
             links(table) -> connections between processes, beside those between stages
             divided(costs, device, K) -> the costs where stages share the last layer, and the part of each
             shares(costs of another model, K) -> the share that this model adds to each stage
             lines(plan) yields lines of a report, (name, text)
    search   what the planner tries, of which a mode has what it needs:
             possible(adapter, loss, mini_batch) yields the fields of modes that these allow
             ways(planner, config) yields both, with what the mode's keys leave open decided
             cuts(config, tokens) -> the groups that rows of so many tokens may be cut into
             longer_rows(config) yields keys with which longer rows may fit, as (name, keys)
             outcomes(planner, config, counts of micro-batches) -> the plans where the mode has its own; else None
             SCHEDULES, and is_worth_a_try(planner, config): schedules that "auto" tries too
             instead(plan) and leaner(planner, settings, partition) yield plans where memory is short
             fixes(planner, settings) yields keys with which less memory is enough, as (words, keys)
             way(plan) -> words for where its weights are; empty: on their devices
             untried(config, plans) -> what was not tried, in words; else empty
    check    before a plan, and again once the configuration is decided, of which a mode has what it needs:
             check(config, adapter, loss, packing=..., probe=...) raises UserError where these do not go with the mode;
             the loss of a companion is None
             verify(config, adapter, packing=..., probe=...) raises UnsupportedModelError where a tiny clone differs
    cutting  cutter(config) -> what cuts micro-batches further (`hf_gpipe.runtime.cutting.Cutter`), or None
             members(micro_batch, groups, adapter) -> the members of the group that a micro-batch is cut into
    stages   divide(stage, ranks) -> the division of a stage's layers among the ranks of a worker, which it then has
             parts(adapter, parameters, num_ranks) -> the parameters of which one rank has a part, by name
    building Builder, a `ModeBuilder`: what the mode does while a pipeline is built
    runtime  what the executor calls:
             State(rows), a `ModeState`, which actions find in `Step.modes` under the mode's name
             perform(kind, run) is called for each kind of the mode (`hf_gpipe.runtime.performing`)
    training what a trainer calls:
             check(trainer) raises UserError where the training does not go with the mode
             updates(trainer, logs) -> its `hf_gpipe.training.updates.Updates`, or None
"""
