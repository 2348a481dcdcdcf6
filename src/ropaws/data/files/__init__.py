"""A person's own image files."""
