"""Linen modules: the frozen backbone, the KV cache it fills, and the MTP head that reads both."""
