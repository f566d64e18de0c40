"""What executes a model."""
