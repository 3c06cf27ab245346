"""Workers that take a model's weights from each other, in virtual time."""
