"""Prefill, draft, verify, commit: one loop for vanilla and speculative decoding."""
