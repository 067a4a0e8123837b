"""Names for prototypes: ``write`` samples positions, names them and scores the names."""
