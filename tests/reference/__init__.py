"""Independent oracles: they import nothing of workbench."""
