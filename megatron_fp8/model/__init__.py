"""The GPT model: one pipeline stage, its sharding, its initial weights, its assembly."""
