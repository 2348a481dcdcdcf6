"""Images in, predictions out."""
