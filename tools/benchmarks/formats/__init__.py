"""The comparison of number formats: the same small model, data and seeds in every mode, torchao's FP8 among them."""
