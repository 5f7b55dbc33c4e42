"""The costs of a model's layers for one micro-batch: arithmetic, bytes, calls, and seconds where they are measured.

`layers.LayerTracer` runs one layer of each class on fake tensors, and `measure.profile_layers` runs it on a device.
Both give `model_costs.ModelCosts`, one record for each layer. `stage_costs.StageCosts` adds them up for any run of
layers. The package knows devices (`planner.machines`) and what a stage holds; it knows neither tables nor plans.
"""
