"""The loss of a language model from hidden states, without all logits in memory."""
