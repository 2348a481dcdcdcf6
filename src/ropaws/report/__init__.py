"""Results as figures and pages. Reads numbers and files; knows nothing of torch."""
