"""From features to answers: prior, head, propagation, calibration."""
