"""What `autoshard calibrate` measures, and how."""
