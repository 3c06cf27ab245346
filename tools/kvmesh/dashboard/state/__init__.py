"""What the page shows, kept up to date by messages. Pure: no I/O, time is passed in."""
