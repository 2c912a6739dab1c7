"""Networks as files: saved to be loaded again, exported to run without Python classes, quantised, run and timed."""
