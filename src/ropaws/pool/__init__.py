"""Images in, batches out."""
