"""Backbones, weight files, and the features they give of images, kept in one cache."""
