"""Ways of saying what a prediction relies on, one a file: predictions to scores of passages."""
