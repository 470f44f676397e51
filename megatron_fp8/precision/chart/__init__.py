"""The precision chart: every kind of tensor of a run, with its format and its bytes. Imports no torch."""
