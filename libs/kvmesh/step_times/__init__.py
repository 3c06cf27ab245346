"""Times of engine steps on a kind of hardware: measured profiles and rooflines."""
