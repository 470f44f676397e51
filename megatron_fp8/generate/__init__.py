"""Text from a model: forward passes that give the next token's logits, the choice of a token, and the loop."""
