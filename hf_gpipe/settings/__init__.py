"""The settings of the engine, its modes and its losses: frozen values that are checked strictly. Imports no torch."""
