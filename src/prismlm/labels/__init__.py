"""Names for prototypes, made of the places where they are nearest, and scored."""
