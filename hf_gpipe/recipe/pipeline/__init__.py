"""The section `pipeline`. Its keys are in files by subject, each with their meaning and rules: how the model is cut
(stages.py) and its layers divided (division.py), the mesh, chunks of rows, weights that visit, and processes."""
