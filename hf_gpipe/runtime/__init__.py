"""Running a schedule: processes and devices, the tensors that cross stages, and the executor."""
