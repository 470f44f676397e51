"""The command-line programs: `main` has their names and runs them; each is a module with `main(arguments)`."""
