"""Robust semi-supervised learning from uncurated data: PAWS and RoPAWS in PyTorch."""

__version__ = "0.1.0"
