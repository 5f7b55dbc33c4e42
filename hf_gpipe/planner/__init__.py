"""Will it fit, and how fast: the costs of layers, the memory and time of a plan, and the choice of the plan."""
