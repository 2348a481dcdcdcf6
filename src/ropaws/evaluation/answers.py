"""What a person said of an image, beside the numbers of the classes from 0."""

UNLABELED = -1  # nothing yet
OUT_OF_CLASS = -2  # it belongs to none of the classes
