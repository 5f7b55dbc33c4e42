"""The search for the fastest plan that fits, and what is advised where none does.

`choose.best_plan` decides what a configuration leaves open: it tries schedules, numbers of micro-batches and meshes,
cuts the model (`cut`), and may make a table for the best plan (`listed`). `planner.plan` predicts each
plan and knows nothing of the search.
"""
