"""The operators, each one tile program built from a spec and a plan."""
