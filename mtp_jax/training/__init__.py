"""From prompts to a head: rollouts, features, batches, loss, the training loop."""
