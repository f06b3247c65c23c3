"""attnkit."""
