"""Models from and for other engines, one file a format."""
