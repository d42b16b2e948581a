"""Measuring a head as it will be used: acceptance, identical output, and wall clock against vanilla decoding."""
