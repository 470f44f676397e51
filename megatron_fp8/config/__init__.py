"""The config: schema, loading, derived sizes, checks and command line. Imports no torch."""
