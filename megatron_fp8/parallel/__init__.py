"""Process groups, this rank's coordinates, seeds and the amax group."""
