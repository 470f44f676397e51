"""The specification of the project, as tests."""
