"""Bytes on disk <-> parameter trees and tokenizers. Nothing is imported here: `from mtp_jax.checkpoints import load`."""
