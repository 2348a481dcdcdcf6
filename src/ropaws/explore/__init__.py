"""The page in a browser in which a person looks at images, labels them, and refits a classifier."""
