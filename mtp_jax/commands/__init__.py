"""The subcommands of `mtp-jax`: one frozen dataclass each, whose fields are its flags and whose `run` does the work."""
