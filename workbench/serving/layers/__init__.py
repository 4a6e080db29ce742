"""The layers of an engine as it built them, beside what its configuration says."""
